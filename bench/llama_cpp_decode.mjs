// Time of a decode step in llama.cpp: FILE.gguf THREADS STEPS -> {"median_ms": ..., "version": ...}
import {getLlama, getModuleVersion} from "node-llama-cpp";

const [modelPath, threads, steps] = process.argv.slice(2).map((text, i) => i ? Number(text) : text);
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 512, threads, batchSize: 128});
const prompt = Array.from({length: 64}, (_, i) => 100 + 37 * i);
const times = [];
let last = performance.now();
for await (const _ of context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
  const now = performance.now();
  times.push(now - last);
  last = now;
  if (times.length > steps) break;
}
times.shift();  // the prompt
times.sort((a, b) => a - b);
const version = `${llama.llamaCppRelease.release}, node-llama-cpp ${await getModuleVersion()}`;
console.log(JSON.stringify({median_ms: times[times.length >> 1], version}));
process.exit(0);
