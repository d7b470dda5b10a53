"""The config of compressed-tensors checkpoints: which modules have packed weights, and with what settings.

``config_groups`` hold settings and ``targets``: names of modules, patterns ``re:...``, and ``Linear``, which
is every module here. Modules are those that have a weight_packed in the file.

- A name counts more than a pattern, and a pattern more than ``Linear``, as in the tool.
- Where that leaves groups with different settings, the module is refused: the tool's choice then hangs on
  how the patterns are spelled.
- A module that no group targets, or that ``ignore`` names, is refused: nothing says what its bits mean.
- Targets that find nothing are no error: a module without a weight_packed is not quantized.
- Every group has to be one that is read, also if it finds nothing. A model half of which is 8-bit would be
  lost without its config.

Groups with quantized activations are refused, although their weights could be read: their product is another
one. So are sparse weights, and transforms, which change the activations first.

Sources: compressed-tensors 0.10.2 and 0.20.1, ``quant_args.py``, ``quant_scheme.py``, ``quant_config.py``
(settings and their defaults), ``lifecycle/apply.py`` and ``utils/match.py`` (which settings a module has).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from marlin_jit.errors import CheckpointError
from marlin_jit.formats.module_patterns import ModuleTable, PatternError
from marlin_jit.formats.safetensors_io import shown

__all__ = ["ModuleSettings", "WeightSettings"]

FORMAT = "pack-quantized"


@dataclass(frozen=True)
class WeightSettings:
    """The settings of a config group that decide what the bits of a weight mean.

    Attributes
    ----------
    group_size : int
        -1 is one group a column (strategy ``channel``).
    symmetric : bool
    reordered : bool
        Whether rows are in groups by weight_g_idx (``actorder: group``).
    """

    group_size: int
    symmetric: bool
    reordered: bool


class ModuleSettings:
    """The settings of each module.

    Parameters
    ----------
    config : dict
        The quantization_config.
    where : str
        File (and key) that it comes from, for messages.

    Raises
    ------
    CheckpointError
        Settings that are not read.
    """

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._where = where
        _refuse_what_changes_products(config, where)
        self._targets = _read_groups(config, where)
        self._ignored = _read_ignored(config, where)

    def of(self, module: str) -> WeightSettings:
        """Return the settings of a module that has a weight_packed.

        Raises
        ------
        CheckpointError
            No group targets it, or several with different settings; `ignore` names it.
        """
        what = f"{self._where}: layer {module}, which has a weight_packed,"
        try:
            ignored, found = self._ignored.find(module), self._targets.find(module)
        except PatternError as error:
            raise CheckpointError(f"{what} is not to be matched with the patterns: {error}") from None
        if ignored:
            raise CheckpointError(f"{what} is one that ignore names: {shown(ignored[0])}")
        if not found:
            raise CheckpointError(f"{what} is the target of no config group")
        group, settings = found[0]
        for other, others in found:
            if others != settings:
                raise CheckpointError(
                    f"{what} is the target of two config groups that differ: {shown(group)}, {shown(other)}"
                )
        return settings


def _refuse_what_changes_products(config: dict[str, Any], where: str) -> None:
    """Refuse sparse weights, and activations that are to be transformed first."""
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") in (None, "dense")):
        kind = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
        raise CheckpointError(
            f"{where}: sparsity_config of format {shown(kind)} is not read; accepted: 'dense'"
        )
    transform = config.get("transform_config")
    if transform and transform != {"config_groups": {}}:
        raise CheckpointError(
            f"{where}: transform_config is not read: its weights go with activations that are transformed"
        )


def _read_groups(config: dict[str, Any], where: str) -> ModuleTable[tuple[str, WeightSettings]]:
    """Return name and settings of config groups by target."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}: config_groups is {shown(groups)}; expected a JSON object of groups")
    table: ModuleTable[tuple[str, WeightSettings]] = ModuleTable()
    for name, group in groups.items():
        here = f"{where}: config group {shown(name)}"
        if not isinstance(group, dict):
            raise CheckpointError(f"{here} is {shown(group)}, not a JSON object; presets are not read")
        settings = _read_group(group, config.get("format"), here)
        for target in _names(group.get("targets"), f"{here}: targets"):
            _add(table, target, (name, settings), f"{here}: target")
    return table


def _read_ignored(config: dict[str, Any], where: str) -> ModuleTable[str]:
    table: ModuleTable[str] = ModuleTable()
    ignored = config.get("ignore")
    for target in _names([] if ignored is None else ignored, f"{where}: ignore"):
        _add(table, target, target, f"{where}: ignore")
    return table


def _names(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{where} is {shown(value)}; expected a list of strings")
    return value


def _add(table: ModuleTable[Any], target: str, value: Any, where: str) -> None:
    try:
        table.add(target, value)
    except PatternError as error:
        raise CheckpointError(f"{where} {shown(target)} {error}") from None


def _read_group(group: dict[str, Any], format_of_all: Any, where: str) -> WeightSettings:
    """Return the settings of a group, or say why it is not read."""
    named = format_of_all if group.get("format") is None else group["format"]
    if named != FORMAT:
        raise CheckpointError(f"{where}: format {shown(named)} is not read; accepted: {FORMAT!r}")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise CheckpointError(f"{where}: {key} are quantized; only weights may be (null is accepted)")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: weights is {shown(weights)}; expected a JSON object")
    bits, kind = weights.get("num_bits"), _lower(weights.get("type", "int"))
    if isinstance(bits, bool) or bits != 4:
        raise CheckpointError(f"{where}: num_bits is {shown(bits)}; only 4-bit weights are packed")
    if kind != "int":
        raise CheckpointError(f"{where}: type is {shown(kind)}; only 'int' is read")
    if weights.get("dynamic") not in (None, False):
        raise CheckpointError(f"{where}: dynamic is {shown(weights['dynamic'])}; weights are read with false")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}: symmetric is {shown(symmetric)}; expected true or false")
    size = _group_size(weights, where)
    return WeightSettings(size, symmetric, _reordered(weights, where))


def _group_size(weights: dict[str, Any], where: str) -> int:
    """Return the group size, -1 for one group a column."""
    size: Any = weights.get("group_size")
    strategy = _lower(weights.get("strategy"))
    positive = type(size) is int and 1 <= size < 1 << 31
    if strategy is None:  # the tool reads it off the size
        strategy = "group" if positive else "channel" if size == -1 else None
    if strategy == "group" and positive:
        return int(size)
    if strategy == "channel" and size in (None, -1):
        return -1
    if strategy not in ("group", "channel"):
        raise CheckpointError(
            f"{where}: strategy {shown(strategy)} is not read; accepted: 'group', 'channel'"
        )
    expected = "a positive integer" if strategy == "group" else "null or -1"
    raise CheckpointError(f"{where}: group_size is {shown(size)}; strategy {strategy!r} takes {expected}")


def _reordered(weights: dict[str, Any], where: str) -> bool:
    """Whether groups are by weight_g_idx. (``weight`` and ``static`` only changed how codes were found.)"""
    actorder = _lower(weights.get("actorder"))
    if actorder in (None, False, "weight", "static"):
        return False
    if actorder in (True, "group", "dynamic"):
        return True
    raise CheckpointError(
        f"{where}: actorder {shown(actorder)} is not read; accepted: null, 'weight', 'static', 'group', "
        "'dynamic', true, false"
    )


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value
