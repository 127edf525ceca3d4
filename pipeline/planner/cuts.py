"""Names of cuts: a layer's name, or a module's path, which means behind that module's last layer.

People know their modules, the traced graph knows its nodes; both may name the place where a model is cut.
"""

import difflib
from collections.abc import Sequence
from itertools import pairwise

from ...compression.errors import PlanError
from ...stages.planner.network_profile import Profile


def allowed_cuts(profile: Profile) -> list[int]:
    """Positions where the model may be cut, ascending; position p is in front of layer p."""
    return [p for p in range(1, len(profile.layers)) if p - 1 not in profile.refused]


def named_cuts(profile: Profile, cuts: Sequence[str]) -> list[int]:
    """Positions of the cuts behind these layers or modules.

    Raises:
        PlanError: an unknown name (close ones are listed), a refused place (with its reason), the end of the
            model, a place given twice, or cuts that do not follow the order of the layers.
    """
    if isinstance(cuts, str):
        raise PlanError(f"cuts is a list of names, found {cuts!r}; write [{cuts!r}]")
    positions = [_position(profile, name) for name in cuts]
    for (before, name), (first, second) in zip(pairwise(cuts), pairwise(positions), strict=True):
        if first == second:
            raise PlanError(
                f"cuts {before} and {name} are one place, behind {profile.layers[first - 1].name}; drop one"
            )
        if first > second:
            raise PlanError(f"cuts follow the order of the layers, found {name} behind {before}; swap them")
    return positions


def _position(profile: Profile, name: str) -> int:
    index = _last_layer(profile, name)
    layer = profile.layers[index].name
    if index == len(profile.layers) - 1:
        raise PlanError(
            f"a cut has a layer behind it, found {name}, which ends with the last layer {layer}; cut earlier"
        )
    if index in profile.refused:
        near = sorted(allowed_cuts(profile), key=lambda position: abs(position - 1 - index))[:2]
        allowed = " or ".join(profile.layers[position - 1].name for position in near) or "nowhere"
        raise PlanError(
            f"the model cannot be cut behind {layer} ({name}): {profile.refused[index]}; nearest: {allowed}"
        )
    return index + 1


def _last_layer(profile: Profile, name: str) -> int:
    names = [layer.name for layer in profile.layers]
    if name in names:
        return names.index(name)
    inside = [i for i, layer in enumerate(profile.layers) if f"{layer.module}.".startswith(f"{name}.")]
    if inside and name:
        return inside[-1]
    known = dict.fromkeys([*names, *(module for layer in profile.layers for module in _paths(layer.module))])
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    hint = f"close ones are {', '.join(close)}" if close else f"the layers run from {names[0]} to {names[-1]}"
    raise PlanError(f"a cut is the name of a layer or module, found {name}; {hint}")


def _paths(module: str) -> list[str]:
    """``"a.b.c"`` -> a, a.b, a.b.c."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
