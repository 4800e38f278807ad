"""The device that was asked for, tried before any work is done."""

import torch


def find_device(name: str | None = None) -> torch.device:
    """The device of that name, if torch can compute on it here; without one a GPU where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device is {name!r}, which torch does not know; use cpu, cuda, cuda:1, …") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        seen, use = (f"{count} GPUs", "cuda:0") if count else ("no GPU", "cpu")
        raise ValueError(f"--device is {name!r}, but torch sees {seen}; use --device {use}")
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # backends that are not there raise whatever they like
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"--device is {name!r}, on which torch cannot compute here ({why}); use --device cpu"
        ) from error
    return device
