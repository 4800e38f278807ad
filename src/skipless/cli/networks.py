"""The networks and inputs that `skipless kernels` follows: what its names stand for, and which options they take."""

import dataclasses
import math
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from skipless.console import near_names, nearest
from skipless.inspection import studies
from skipless.inspection.studies import InputSignal, Network
from skipless.lazy import import_extensions
from skipless.model import presets
from skipless.model.config import ModelConfig
from skipless.model.kernel_maps import input_norm
from skipless.theory.feasibility import check_depth, check_length, check_repeat_rate
from skipless.theory.propagation import Skip
from skipless.theory.schemes import SCHEMES, ExponentialSPA, Scheme, StandardAttention, UniformSPA, ValueSkipInit
from skipless.training.config import parse, split_assignments

_OTHER_NAMES: dict[str, Scheme] = {"alibi": StandardAttention(alibi_heads=8), "v-skipinit": ValueSkipInit()}
LABELS = {
    "standard": "Standard",
    "alibi": "Standard",
    "v-skipinit": "Value-SkipInit",
    "u-spa": "U-SPA",
    "e-spa": "E-SPA",
}

_GRID = ("depth", "length", "repeat_rate", "gamma_final", "rho_final", "input_kind", "seed", "blocks")
FIGURES: dict[str, tuple[str, ...]] = {
    "fig1": _GRID,
    "fig5": ("length", "seed"),
    "fig6": ("depth", "length", "repeat_rate", "gamma_final", "input_kind", "seed", "blocks"),
    "fig7": _GRID,
}


@dataclass(frozen=True)
class KernelsArguments:
    """The options that were given; None where nothing was said."""

    depth: int | None = None
    gamma_final: float | None = None
    rho_final: float | None = None
    skip: str | None = None
    mlp_skip: str | None = None
    norm: str | None = None
    activation: str | None = None
    mirrored: bool | None = None
    calibration: str | None = None
    length: int | None = None
    repeat_rate: float | None = None
    input_kind: str | None = None
    seed: int | None = None
    blocks: str | None = None
    assignments: tuple[str, ...] | None = None

    def given(self, *names: str) -> dict[str, Any]:
        """The values of these options, if they were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Selection:
    """Networks to follow with one input and the blocks to show; or, for Fig. 5, inputs alone."""

    name: str
    signals: tuple[InputSignal, ...]
    networks: tuple[Network, ...] = ()
    blocks: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Blocks of the networks, which all have the same number."""
        return self.networks[0].config.depth


def select(name: str, options: KernelsArguments) -> Selection:
    """The networks and inputs that a name and its options stand for."""
    if options.depth is not None:
        check_depth(options.depth)
    if name in FIGURES:
        return _figure(name, options)
    if name not in schemes() and "/" not in name:
        import_extensions()
    if name in schemes():
        scheme, rate = _of_kind(name, options.assignments), studies.SIGNAL.repeat_rate
    elif "/" in name or name in presets.known_names():
        name = presets.full_name(name)
        scheme = presets.preset(name).scheme
        rate = getattr(scheme, "repeat_rate", presets.REPEAT_RATE)
    else:
        raise _unknown(name)
    signal = _signal(options, InputSignal(rate))
    config = _configuration(name, scheme, signal, options)
    network = Network(LABELS.get(name, name), config, input_norm(config) if name in presets.PRESETS else 1.0)
    return Selection(name, (signal,), (network,), _blocks(options.blocks, network.config.depth))


def schemes() -> list[str]:
    """The names of schemes: the paper's, and those that imported code has registered."""
    own = [kind for kind in SCHEMES if kind not in ("standard", "value-skipinit")]
    return ["standard", *_OTHER_NAMES, *own]


def _of_kind(name: str, assignments: tuple[str, ...] | None) -> Scheme:
    """The scheme of a name with its defaults; a field without one has to be among the assignments."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    return Scheme.from_dict({"kind": name, **_assigned(SCHEMES[name], assignments)})


def name_list() -> str:
    """Every name, by kind."""
    import_extensions()
    kinds = {"figures": FIGURES, "schemes": schemes(), "presets": presets.names()}
    return "\n".join(f"{kind}:\n" + "\n".join(f"  {name}" for name in names) for kind, names in kinds.items())


def _figure(name: str, options: KernelsArguments) -> Selection:
    for field in fields(options):
        if getattr(options, field.name) is not None and field.name not in FIGURES[name]:
            takes = ", ".join(_spelled(each) for each in FIGURES[name])
            raise ValueError(f"{_spelled(field.name)} does not apply to {name}, which takes {takes}")
    if name == "fig5":
        length = studies.SIGNAL.length if options.length is None else options.length
        if length < 2:
            raise ValueError(f"--length is {length}; {name} counts equal pairs of locations, so give at least 2")
        return Selection(name, tuple(studies.token_signals(length, options.seed or 0)))
    if name == "fig6":
        signal = _signal(options, studies.CORRECTION_SIGNAL)
        build = studies.correction_networks
    else:
        signal = _signal(options, studies.SIGNAL)
        build = studies.networks
    networks = build(signal=signal, **options.given("depth", "gamma_final", "rho_final"))
    networks = networks[:3] if name == "fig1" else networks
    return Selection(name, (signal,), tuple(networks), _blocks(options.blocks, networks[0].config.depth))


def _signal(options: KernelsArguments, default: InputSignal) -> InputSignal:
    if options.seed is not None and options.input_kind == "average":
        raise ValueError("--seed picks a sampled sequence, and --input average has none: leave one of them out")
    changes = options.given("length", "repeat_rate", "seed")
    if options.input_kind is not None:
        changes["kind"] = options.input_kind
    signal = dataclasses.replace(default, **changes)
    check_length(signal.length)
    check_repeat_rate(signal.repeat_rate)
    return signal


def _configuration(name: str, scheme: Scheme, signal: InputSignal, options: KernelsArguments) -> ModelConfig:
    """The network at the length it is looked at, so that calibrations that need a length take that one."""
    changes: dict[str, Any] = {"length": signal.length, "scheme": _scheme(name, scheme, signal, options)}
    changes |= options.given("depth")
    if options.norm is not None:
        changes["norm"] = options.norm
    for field, text in (("attention_skip", options.skip), ("mlp_skip", options.mlp_skip)):
        if text is not None:
            changes[field] = _skip(text, "--mlp-skip" if field == "mlp_skip" else "--skip")
    if options.skip is not None and "," in options.skip and scheme.preserves_signal:
        raise ValueError(f"--skip is {options.skip}; with SPA attention give one weight α, which makes β = √(1−α²)")
    if options.activation == "none" or (name in schemes() and options.activation is None and not options.mirrored):
        _refuse_mlp_options(options)
        changes["hidden"] = 0
    elif options.activation is not None:
        changes["activation"] = options.activation
    if options.mirrored:
        changes = {"mlp_init": "mirrored", "activation": None} | changes
    if name.startswith("vit/"):
        changes["images"] = None  # theory knows locations, not what they are of
    if name not in schemes():
        return presets.preset(name, **changes)
    bare: dict[str, Any] = {"depth": studies.DEPTH, "position": "none", "activation": "identity"}
    if (own := changes["scheme"]).by_head:
        bare |= {"heads": own.heads, "width": 64 * own.heads, "value_output": "identity"}
    return ModelConfig(**(bare | changes))


def _refuse_mlp_options(options: KernelsArguments) -> None:
    if options.mlp_skip is not None:
        raise ValueError("--mlp-skip needs MLPs, and this network is attention-only: add --activation, e.g. dks-gelu")
    if options.mirrored:
        raise ValueError("--mirrored is about MLPs, and this network is attention-only: leave out --activation none")
    if options.calibration == "mlp-aware":
        raise ValueError("--calibration mlp-aware needs MLPs: add --activation dks-gelu, or use --calibration exact")


def _scheme(name: str, scheme: Scheme, signal: InputSignal, options: KernelsArguments) -> Scheme:
    """The scheme with its options and the input's repeat rate; an option of another scheme is refused."""
    changes = options.given("gamma_final", "rho_final") | _assigned(type(scheme), options.assignments)
    if options.calibration is not None:
        changes["calibration"] = options.calibration
    known = {field.name for field in fields(scheme)}
    for field in changes:
        if field not in known:
            owner = {"gamma_final": "E-SPA", "rho_final": "U-SPA", "calibration": "E-SPA and U-SPA"}[field]
            takes = {ExponentialSPA: "; E-SPA takes --gamma-final", UniformSPA: "; U-SPA takes --rho-final"}
            instead = takes.get(type(scheme), "")
            raise ValueError(f"{_spelled(field)} belongs to {owner} and does not apply to {name}{instead}")
    if "repeat_rate" in known:
        changes["repeat_rate"] = signal.repeat_rate
    return dataclasses.replace(scheme, **changes)


def _assigned(kind: type[Scheme], assignments: tuple[str, ...] | None) -> dict[str, Any]:
    """The fields of a scheme that --set gives, each of its type."""
    hints, values = get_type_hints(kind), split_assignments(assignments or ())
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(f"--set {name}: {kind.__name__} has no such field; {nearest(name, known)}")
    return {name: parse(text, hints[name], name) for name, text in values.items()}


def _skip(text: str, option: str) -> Skip:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) == 1 and 0.0 <= weights[0] < 1.0:
        return Skip.normalised(weights[0])
    if len(weights) == 2 and all(math.isfinite(weight) for weight in weights):
        return Skip(weights[0], weights[1])
    raise ValueError(
        f"{option} is {text!r}; give one weight α in [0, 1), which makes β = √(1−α²), "
        "or both as α,β (1,1 is the usual skip)"
    )


def _blocks(text: str | None, depth: int) -> tuple[int, ...]:
    if text is None:
        return tuple(studies.default_blocks(depth))
    try:
        blocks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--blocks is {text!r}; it is a list of whole numbers such as 0,1,10,{depth}") from None
    if blocks[0] < 0 or blocks[-1] > depth:
        raise ValueError(f"--blocks is {text!r}; the network has blocks 1 to {depth}, and 0 is the input")
    return tuple(blocks)


def _spelled(field: str) -> str:
    return "--input" if field == "input_kind" else f"--{field.replace('_', '-')}"


def _unknown(name: str) -> ValueError:
    near = near_names(name, [*schemes(), *FIGURES, *presets.known_names()])
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return ValueError(
        f"there is no figure, scheme or preset {name!r}{meant} Figures: {', '.join(FIGURES)}; "
        f"schemes: {', '.join(schemes())}, and your own with --import FILE.py; presets: see `skipless kernels --list`"
    )
