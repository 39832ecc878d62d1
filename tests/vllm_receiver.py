"""vLLM's own receiver for NCCL, of which a few Python files are enough: stand-ins take the place of the rest of vLLM,
which needs compiled files and dozens of packages.

python -m tests.vllm_receiver SITE_PACKAGES ZIP     # packs these files, for a machine without vLLM
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.rollout_servers import FakeVllmNccl, Process, infos_of

FILES = [
    "distributed/device_communicators/pynccl.py",
    "distributed/device_communicators/pynccl_wrapper.py",
    "distributed/weight_transfer/base.py",
    "distributed/weight_transfer/nccl_common.py",
    "distributed/weight_transfer/nccl_engine.py",
    "distributed/weight_transfer/packed_tensor.py",
    "utils/nccl.py",
]
"""Of the package ``vllm``, as they are since 0.32."""


def vllm_folder() -> Path | None:
    """Where vLLM's files are, if they can be imported; vLLM itself is not."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    return next((each for each in folders if all((each / name).exists() for name in FILES)), None)


def nccl_library() -> str | None:
    """NCCL of torch's version, as all members need the same: a file of its own, or torch's where it is within that."""
    if not torch.cuda.is_available():
        return None
    within = str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so")
    for path in ("libnccl.so.2", within):
        found = ctypes.c_int()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(found))
        major, minor, patch = torch.cuda.nccl.version()
        if found.value == 10000 * major + 100 * minor + patch:
            return path
    return None


def _module(name: str, folder: Path | None = None, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [] if folder is None else [str(folder)]
    vars(module).update(contents)
    return module


def _stand_ins(folder: Path) -> dict[str, types.ModuleType]:
    """What the files import: packages whose ``__init__`` is not run, and what the receiver uses of others."""

    def with_class(module: str, name: str) -> types.ModuleType:
        return _module(module, **{name: type(name, (), {})})

    envs = _module("vllm.envs", VLLM_DISABLE_PYNCCL=False, VLLM_NCCL_SO_PATH=nccl_library())
    made = [
        _module("vllm", folder, envs=envs),
        envs,
        _module("vllm.config"),
        with_class("vllm.config.parallel", "ParallelConfig"),
        with_class("vllm.config.weight_transfer", "WeightTransferConfig"),
        _module("vllm.distributed", folder / "distributed"),
        _module("vllm.distributed.device_communicators", folder / "distributed" / "device_communicators"),
        with_class("vllm.distributed.utils", "StatelessProcessGroup"),
        _module("vllm.distributed.weight_transfer", folder / "distributed" / "weight_transfer"),
        _module("vllm.logger", init_logger=lambda name: mock.MagicMock()),
        _module("vllm.platforms", current_platform=mock.MagicMock(is_rocm=lambda: False)),
        _module("vllm.utils", folder / "utils"),
        _module("vllm.utils.torch_utils", current_stream=torch.cuda.current_stream),
        _module("vllm.model_executor"),
        _module("vllm.model_executor.model_loader"),
        _module(
            "vllm.model_executor.model_loader.mtp_validation", disable_mtp_completeness_check=contextlib.nullcontext
        ),
        _module(
            "vllm.model_executor.model_loader.reload",
            initialize_layerwise_reload=lambda model: None,
            finalize_layerwise_reload=lambda model, config: None,
        ),
        _module("pybase64", b64decode=base64.b64decode),
    ]
    return {module.__name__: module for module in made}


@contextlib.contextmanager
def imported_engine() -> Iterator[Any]:
    """vLLM's module ``nccl_engine``, beside stand-ins, which go at the end.

    Raises:
        ImportError: vLLM's files are not there.
    """
    folder = vllm_folder()
    if folder is None:
        raise ImportError("vLLM's Python files cannot be imported")
    made = _stand_ins(folder)
    before = {name: sys.modules[name] for name in sys.modules if _is_ours(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(made)
    try:
        import vllm.distributed.weight_transfer.nccl_engine as found
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        library = ctypes.CDLL(nccl_library())  # an older one has not all that vLLM calls elsewhere
        NCCLLibrary.exported_functions = [f for f in NCCLLibrary.exported_functions if hasattr(library, f.name)]
        yield found
    finally:
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in ("vllm", "pybase64")


class VllmReceiver(FakeVllmNccl):
    """A server's stand-in that receives by vLLM's own engine, on a GPU.

    Args:
        engine: the module, from :func:`imported_engine`.
    """

    has_plugin = False

    def __init__(self, engine: Any, weights: dict[str, Tensor], timeout_s: float, device: torch.device) -> None:
        super().__init__(weights, timeout_s, device=device)
        parallel = types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = types.SimpleNamespace(parallel_config=parallel, model_config=None)
        self._engine = engine.NCCLWeightTransferEngine(
            None, config, device, types.SimpleNamespace(load_weights=self.load)
        )

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.process.weights[name].copy_(tensor)

    def _init(self, place: dict[str, Any]) -> None:
        with torch.cuda.device(self.device):
            self._engine.init_transfer_engine(self._engine.init_info_cls(**place))

    def _update(self, process: Process, info: dict[str, Any]) -> None:
        process.refuse_outside(500)
        assert process.paused and infos_of(info, "dtype_names")
        with torch.cuda.device(self.device):
            self._engine.receive_weights(self._engine.update_info_cls(**info))
            torch.cuda.synchronize()

    def leave(self, group: str) -> None:
        self._engine.shutdown()


def main(site: str, target: str) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("vllm/__init__.py", "")
        for name in FILES:
            packed.write(Path(site, "vllm", name), f"vllm/{name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
