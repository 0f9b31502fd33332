import importlib.util

# `make test-npu` has torch_npu and runs all of this; `make test` has not, and none of it is about
# what `make test` covers.
collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]
