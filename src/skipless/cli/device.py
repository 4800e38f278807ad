"""The device a command was asked for, tried before any work is done."""

import torch


def find_device(name: str) -> torch.device:
    """The device of that name, if torch can compute on it here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device is {name!r}, which torch does not know; use cpu, cuda, cuda:1, …") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"--device is {name!r}, but torch sees {count} GPUs; use --device {'cuda:0' if count else 'cpu'}"
        )
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # backends that are not there raise whatever they like
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"--device is {name!r}, on which torch cannot compute here ({why}); use --device cpu"
        ) from error
    return device
