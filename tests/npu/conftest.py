import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# `make test-npu` has torch_npu and runs all of this; `make test` has not, and none of it is about
# what `make test` covers.
# What runs on hardware alone says so itself, wherever it is collected.
collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_[!h]*.py"]


@pytest.fixture(scope="module")
def all_shapes() -> Iterator[None]:
    """Shape functions that the wheel leaves out.

    A cast keeps shape and dtype; eight 4-bit values share an int32; the gather in place has the
    shapes of the one that is not.
    """
    library = torch.library.Library("npu", "IMPL", "Meta")
    library.impl("npu_format_cast", lambda x, acl_format, **_: torch.empty_like(x))
    library.impl(
        "npu_convert_weight_to_int4pack",
        lambda weight, inner_k_tiles=0: weight.new_empty(weight.shape[0], weight.shape[1] // 8),
    )

    def gather(*args: Any, **kwargs: Any) -> None:
        outputs = torch.ops.npu.npu_gather_pa_kv_cache_functional(*args, **kwargs)
        assert [out.shape for out in outputs] == [out.shape for out in args[4:6]]

    library.impl("npu_gather_pa_kv_cache", gather)
    yield
    library._destroy()
