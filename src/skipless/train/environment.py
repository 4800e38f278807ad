"""Where and with what a run happens: versions, device, commit, command."""

import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import skipless
from skipless.train.collective import world_size

_PACKAGES = ("numpy", "scipy", "safetensors", "transformers", "triton")


def environment() -> dict[str, Any]:
    """Everything outside the experiment that a result may depend on. No environment variables: they hold secrets."""
    cuda = torch.cuda.is_available()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "skipless": skipless.__version__,
        "git": git_state(Path(skipless.__file__).parent),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else (platform.processor() or platform.machine()),
        "world_size": world_size(),
        "threads": torch.get_num_threads(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks the code in `folder`, and whether files there differ from it; else None."""
    try:
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")  # an installed copy may lie inside another checkout
        return {"commit": _git(folder, "rev-parse", "HEAD"), "dirty": bool(_git(folder, "status", "--porcelain", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, env=quiet)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
