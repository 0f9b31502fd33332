"""The place of a rank in its engine, as plain numbers.

Rank = dp_rank * tp_size + tp_rank, or cp_rank * tp_size + tp_rank. With DP 2, TP 2:

    dp_rank 0: ranks 0 1    tensor-parallel groups: {0 1} {2 3}
    dp_rank 1: ranks 2 3    expert-parallel groups of EP 4: {0 1 2 3}; of EP 2: {0 1} {2 3}

Attention and dense layers are split over a tensor-parallel group; data-parallel groups hold other
requests; context-parallel groups, in their place, other rows of the same ones. Experts are dealt
out over an expert-parallel group; with ep_size 1 they are split like dense layers.

With pp_size stages, each of them is so many neighbouring ranks, spread like this, and has some of
the layers: rank = pp_rank * stage_size + rank within the stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

MoEComm = Literal["zero_redundancy", "allreduce", "allgather"]
"""How tokens get from attention to the experts and back; see engine.layers.dispatch."""

MoEExchange = Literal["auto", "all_to_all", "gather"]
"""How rows that no two ranks share get to experts of other ranks; see engine.step_plan."""

SharedExperts = Literal["replicated", "tp"]
"""Where the experts of every token are: whole on every rank, or split over tp like a dense MLP."""

EplbMode = Literal["off", "static", "dynamic"]
"""Where experts are: in order; as a file says; or where the load of the last steps wants them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EplbConfig:
    """How the load of experts is balanced over the ranks that share them."""

    mode: EplbMode = "off"
    """off deals experts out in order; static follows `file`; dynamic moves them while serving."""
    file: str = ""
    """Placement or heat, by layer, to start from; see engine.expert_files. static needs it."""
    num_redundant_experts: Annotated[int, Ge(0)] = 0
    """Slots for second and further copies of hot experts, of all ranks together."""
    interval_steps: Annotated[int, Ge(1)] = 1000
    """dynamic: steps between two looks at the load."""
    num_nodes: Annotated[int, Ge(1)] = 1
    """Hosts, of equally many neighbouring ranks: groups of experts stay within one."""
    heat_file: str = ""
    """Where tokens per expert are written every interval_steps; empty: nowhere."""

    def problem(self, ep_size: int) -> str:
        """What does not fit each other or this many ranks; empty: nothing."""
        if self.is_on and ep_size == 1:
            return "eplb is on, and ep is 1: experts are on every rank"
        if self.mode == "off" and (self.num_redundant_experts or self.file):
            return "eplb has a file or redundant experts, and eplb.mode is off: set it"
        if self.mode == "static" and not self.file:
            return "eplb.mode is static: eplb.file must name a placement or heat"
        if ep_size % self.num_nodes:
            return f"eplb.num_nodes is {self.num_nodes}: must divide ep, which is {ep_size}"
        return ""

    def check_heat_file(self) -> None:
        """Raises: ValueError: there is no folder for it."""
        if self.heat_file and not Path(self.heat_file).absolute().parent.is_dir():
            raise ValueError(f"eplb.heat_file is {self.heat_file}: its folder does not exist")

    @property
    def is_on(self) -> bool:
        """Whether anything is to be done."""
        return self.mode != "off" or self.collects_heat

    @property
    def collects_heat(self) -> bool:
        """Whether tokens per expert are counted."""
        return self.mode == "dynamic" or bool(self.heat_file)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The place of one rank in its engine."""

    tp_size: Annotated[int, Ge(1)] = 1
    """Ranks that share every layer."""
    dp_size: Annotated[int, Ge(1)] = 1
    """Groups of tp_size ranks, with requests of their own."""
    cp_size: Annotated[int, Ge(1)] = 1
    """Groups of tp_size ranks that share the rows of every step; see engine.context_parallel."""
    cp_min_tokens: Annotated[int, Ge(1)] = 64
    """With cp_size above 1: a request's tokens of a step are not split if they are fewer."""
    ep_size: Annotated[int, Ge(1)] = 1
    """Ranks that share the experts: 1, or a divisor of stage_size."""
    pp_size: Annotated[int, Ge(1)] = 1
    """Stages, of stage_size ranks each, that have the layers among them."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: as engine.stages says."""
    rank: Annotated[int, Ge(0)] = 0
    """This rank, of world_size."""
    moe_comm: MoEComm = "zero_redundancy"
    """With ep_size above 1."""
    moe_exchange: MoEExchange = "auto"
    """With ep_size above 1; auto decides at every step."""
    sequence_parallel: bool = False
    """Split the rows of norms and residual over the tensor-parallel group in dense models too."""

    eplb: EplbConfig = EplbConfig()
    """With ep_size above 1."""

    shared_experts: SharedExperts = "replicated"
    """With ep_size above 1."""
    shared_experts_beside: bool = False
    """Compute replicated shared experts on a second thread, beside dispatch and combine."""
    dual_batch_overlap: bool = False
    """Compute steps in two halves, one while the other waits in collectives."""
    dual_batch_min_rows: Annotated[int, Ge(1)] = 32
    """With dual_batch_overlap: steps in which no data-parallel rank has as many rows are one."""
    layer_sharding: tuple[str, ...] = ()
    """Linears, by name, that one rank holds for each layer and sends the others a layer ahead."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank}, tp_size * dp_size * cp_size * pp_size is {self.world_size}"
            )
        if self.cp_size > 1 and self.dp_size > 1:
            raise ValueError(f"cp_size is {self.cp_size}, dp_size {self.dp_size}: one must be 1")
        if self.shared_experts_beside and self.shared_experts == "tp":
            raise ValueError(
                "shared_experts_beside takes shared_experts replicated: tp needs collectives"
            )
        if self.dual_batch_overlap and self.cp_size > 1:
            raise ValueError(f"dual_batch_overlap and cp_size is {self.cp_size}: only one of them")
        if self.dual_batch_overlap and self.tp_size == self.ep_size == 1:
            raise ValueError(
                "dual_batch_overlap takes tp_size or ep_size above 1: layers communicate nothing"
            )
        if self.stage_size % self.ep_size:
            raise ValueError(
                f"ep_size is {self.ep_size}, must divide tp_size * dp_size * cp_size = "
                f"{self.stage_size}"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.stage_size * self.pp_size

    @property
    def stage_size(self) -> int:
        """Ranks of one stage: of the engine, if it has one."""
        return self.tp_size * self.dp_size * self.cp_size

    def pipeline_problems(self, *, has_tiers: bool, speculation: str) -> list[str]:
        """What does not go with several stages, by field and value; of one there is nothing."""
        if self.pp_size == 1:
            return [f"pp_layers is {list(self.pp_layers)}: pp is 1"] if self.pp_layers else []
        problems = []
        if self.pp_layers and len(self.pp_layers) != self.pp_size:
            problems.append(f"pp_layers is {list(self.pp_layers)}: must be {self.pp_size} numbers")
        n = self.pp_size
        found = {
            f"dp is {self.dp_size}: does not go with pp {n}": self.dp_size > 1,
            f"cp is {self.cp_size}: does not go with pp {n}": self.cp_size > 1,
            f"eplb.mode is {self.eplb.mode}: does not go with pp {n}": self.eplb.mode != "off",
            f"eplb.heat_file is set: does not go with pp {n}": bool(self.eplb.heat_file),
            f"layer_sharding is {list(self.layer_sharding)}: does not go with pp {n}": bool(
                self.layer_sharding
            ),
            f"dual_batch_overlap is true: does not go with pp {n}": self.dual_batch_overlap,
            f"pp is {n}: does not go with tiers": has_tiers,
            f"pp is {n}: does not go with speculation mtp": speculation == "mtp",
        }
        return problems + [problem for problem, is_so in found.items() if is_so]

    @property
    def max_steps_under_way(self) -> int:
        """Steps that stages compute at once: one each, and one more, so that no stage waits for the
        leader to learn that the last has ended one.
        """
        return self.pp_size + 1 if self.pp_size > 1 else 1

    @property
    def pp_rank(self) -> int:
        """Which stage this rank is in."""
        return self.rank // self.stage_size

    @property
    def has_even_rows(self) -> bool:
        """Whether ranks that share experts always have equally many rows: they have the same
        rows.
        """
        return self.tp_size % self.ep_size == 0

    @property
    def tp_rank(self) -> int:
        """This rank within its tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """Whose requests this rank computes."""
        return self.rank % self.stage_size // (self.tp_size * self.cp_size)

    @property
    def cp_rank(self) -> int:
        """Which rows of them."""
        return self.rank // self.tp_size % self.cp_size

    @property
    def ep_rank(self) -> int:
        """This rank within its expert-parallel group."""
        return self.rank % self.ep_size

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "ParallelConfig":
        """Inverse of dataclasses.asdict."""
        own = {
            "eplb": EplbConfig(**values["eplb"]),
            "layer_sharding": tuple(values["layer_sharding"]),
            "pp_layers": tuple(values["pp_layers"]),
        }
        return cls(**{**values, **own})
