"""The tables in the form of C++: a ctypes structure for each struct of src/core/tables.h.

The members are the same, in the same order. Texts must live until the structure is pushed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_char_p, c_double, c_int32, c_int64
from typing import TYPE_CHECKING

from ..registry import features, kernel_args
from ..registry.architectures import FAMILIES
from ..registry.dispatch_table import (
    HEAD_DIM_STEP,
    MAX_GENERAL_HEAD_DIM,
    MAX_HEAD_DIM,
    MAX_SPLITS,
    OPERAND_CLASSES,
    SPLIT_UNIT,
    VARLEN_FACTS,
    VARLEN_KERNELS,
)
from ..registry.dtypes import DTYPE_INFO, KERNEL_DTYPES, NAMED_DTYPES
from ..registry.kernel_spec import (
    KINDS,
    MAX_CLUSTER_SIZE,
    MAX_TOTAL_ROWS,
    PAGE_GROUP_ROWS,
    SPARSE_BLOCK,
    SPARSE_BLOCK_M_192,
)
from ..registry.mask_layout import TILE, TILE_WORDS
from ..registry.quant_recipes import KEY_ORDER, RECIPES, WORKSPACE_ALIGNMENT, precision_number
from ..registry.stock_bugs import FACTS

if TYPE_CHECKING:
    from ..registry import dispatch_table, kernel_table, stock_bugs

_DTYPES = DTYPE_INFO | NAMED_DTYPES
DTYPE_IDS = {name: number for number, name in enumerate(_DTYPES)}  # a dtype without an entry gets the next number


def _members(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class DTypeRow(ctypes.Structure):
    _fields_ = (*_members(c_char_p, "name"), *_members(c_int64, "bytes"), *_members(c_int32, "dlpack"))


class FamilyRow(ctypes.Structure):
    _fields_ = (*_members(c_char_p, "backend gpus"), *_members(c_int32, "arch runs_on_later_gpus measured_cc"))


class KernelRow(ctypes.Structure):
    _fields_ = (
        *_members(c_char_p, "name"),
        *_members(c_int64, "d_max dv_max takes always"),
        *_members(c_int32, "kind family element"),
        ("dtype", c_int32 * 4),
        *_members(c_int32, "tile_m tile_n stages cost elementwise"),
        *_members(c_int32, "smem_bytes sector_bytes rows_sector_aligned group_rows max_cluster peers_at_once counters"),
        *_members(c_int32, "workspace_block_rows shares_heads dkdv_alone ctas_per_sm column_tiles"),
        *_members(c_double, "last_tile"),
    )


class ChoiceRow(ctypes.Structure):
    _fields_ = (
        *_members(c_char_p, "description measured"),
        *_members(c_double, "ratio ratio_without_cudnn"),
        *_members(c_int64, "features elements d_min d_max min_sq max_sq min_sk max_sk min_tiles min_packed max_packed"),
        *_members(c_int32, "kind family grad operands tile_m keys_of_tile serve serve_without_cudnn"),
    )


class StockBugRow(ctypes.Structure):
    _fields_ = (*_members(c_char_p, "stock evidence"), *_members(c_int64, "facts features"))


class VarlenRow(ctypes.Structure):
    _fields_ = (*_members(c_char_p, "measured wrong"), ("facts", c_int64), *_members(c_int32, "stock cc serve"))


class FeatureRow(ctypes.Structure):
    _fields_ = (
        *_members(c_char_p, "name description unsupported_reason"),
        *_members(c_int32, "recipe quantizes_values"),
    )


class ArgumentRow(ctypes.Structure):
    _fields_ = (*_members(c_char_p, "name"), *_members(c_int64, "features"), *_members(c_int32, "kind rank dtype"))


class CostModelRow(ctypes.Structure):
    _fields_ = (
        *_members(c_int64, "max_decode_rows max_packed_rows min_rows_saved rows_per_sum max_cluster"),
        *_members(c_int64, "min_equal_rows min_equal_rows_of_gradients max_shared_rows min_shared_keys min_paged_rows"),
        *_members(c_int64, "max_balanced_sequences"),
        *_members(c_double, "packed_wave_ns occupancy cluster_ns cluster_rate combine_ns combine_rate read_efficiency"),
        *_members(c_double, "min_gain_of_sharing_ns unknown_rate min_equal_ns items_per_slot"),
        ("cluster_share", c_double * (MAX_CLUSTER_SIZE + 1)),
    )


class LayoutRow(ctypes.Structure):
    _fields_ = (
        *_members(c_int64, "sparse_block sparse_block_m_192 bitmask_tile bitmask_words"),
        *_members(c_int64, "key_order max_splits split_unit max_head_dim max_general_head_dim head_dim_step"),
        *_members(c_int64, "workspace_alignment page_group_rows max_total_rows"),
    )


def _same(structure: type[ctypes.Structure], row: object, **values: object) -> ctypes.Structure:
    """Return a structure with the equally named attributes of a row, and the members in `values`."""
    names = [name for name, _ in structure._fields_ if name not in values]
    return structure(**{name: getattr(row, name) for name in names}, **values)


def of_dtypes() -> Iterator[DTypeRow]:
    return (DTypeRow(info.torch_name.encode(), info.num_bytes, info.dlpack_code) for info in _DTYPES.values())


def of_families() -> Iterator[FamilyRow]:
    return (_same(FamilyRow, family, backend=family.backend.encode(), gpus=family.gpus.encode()) for family in FAMILIES)


def _family(arch: int) -> int:
    return next(number for number, family in enumerate(FAMILIES) if family.arch == arch)


def _element(name: str) -> int:
    return list(KERNEL_DTYPES).index(name)


def of_kernels(row: kernel_table.KernelRow) -> Iterator[KernelRow]:
    """Yield a structure for each kernel of a row."""
    for spec in row.specs():
        yield _same(
            KernelRow,
            row,
            name=spec.name().encode(),
            takes=features.bits(spec.features),
            always=features.unconditional_bits(spec.features),
            kind=KINDS.index(row.kind),
            family=_family(row.arch),
            element=_element(spec.dtype),
            dtype=(c_int32 * 4)(*(DTYPE_IDS[name] for name in KERNEL_DTYPES[spec.dtype].operands)),
            smem_bytes=spec.smem_bytes(),
            rows_sector_aligned=row.rows_sector_aligned(spec),
            shares_heads=row.shares_heads(spec),
            workspace_block_rows=spec.workspace_block_rows,
            column_tiles=spec.column_tiles,
            max_cluster=row.max_cluster(spec),
        )


def of_choice(row: dispatch_table.ChoiceRow) -> ChoiceRow:
    operands = ("square", "mixed") if row.operands == "vectors" else (row.operands,)
    return _same(
        ChoiceRow,
        row,
        description=row.description.encode(),
        measured=row.measured.encode(),
        features=features.bits(features.TAGS[row.mask].features),
        elements=sum(1 << _element(name) for name in row.elements),
        kind=KINDS.index(row.kind),
        family=_family(row.arch),
        operands=sum(1 << OPERAND_CLASSES.index(operand) for operand in operands),
    )


def of_stock_bug(row: stock_bugs.StockBug) -> StockBugRow:
    facts = sum(1 << FACTS.index(fact) for fact in row.facts)
    return StockBugRow(row.stock.encode(), row.evidence.encode(), facts, features.bits(row.features))


def of_varlen(row: dispatch_table.VarlenRow) -> VarlenRow:
    facts = sum(1 << VARLEN_FACTS.index(fact) for fact in row.facts)
    numbers = {"facts": facts, "stock": VARLEN_KERNELS.index(row.stock)}
    return _same(VarlenRow, row, measured=row.measured.encode(), wrong=row.wrong.encode(), **numbers)


def of_features() -> Iterator[FeatureRow]:
    for feature in features.FEATURES:
        words = (feature.name, feature.description, feature.unsupported_reason)
        recipe = precision_number(feature.recipe) if feature.recipe else 0
        quantizes_values = bool(feature.recipe) and RECIPES[feature.recipe].values is not None
        yield FeatureRow(*(text.encode() for text in words), recipe, quantizes_values)


def of_arguments() -> Iterator[ArgumentRow]:
    for kind, arguments in kernel_args.ARGUMENTS_BY_KIND.items():
        for argument in arguments:
            bringing = features.bits_of_argument(argument.name) if argument.is_optional else 0
            if argument.is_optional and not bringing:
                raise ValueError(
                    f"argument {argument.name} must belong to a feature of features.py, because the argument is "
                    "optional"
                )
            dtype = kernel_args.DTYPES.index(argument.dtype)
            yield ArgumentRow(argument.name.encode(), bringing, KINDS.index(kind), argument.rank, dtype)


def of_cost_model(cost_model: dispatch_table.CostModel) -> CostModelRow:
    return _same(CostModelRow, cost_model, cluster_share=(c_double * (MAX_CLUSTER_SIZE + 1))(*cost_model.cluster_share))


def of_layout() -> LayoutRow:
    """Return the numbers that kernels and C++ share. A tile of the bitmask has one word for each thread."""
    return LayoutRow(
        sparse_block=SPARSE_BLOCK, sparse_block_m_192=SPARSE_BLOCK_M_192, bitmask_tile=TILE, bitmask_words=TILE_WORDS,
        key_order=len(KEY_ORDER), max_splits=MAX_SPLITS, split_unit=SPLIT_UNIT,
        max_head_dim=MAX_HEAD_DIM, max_general_head_dim=MAX_GENERAL_HEAD_DIM, head_dim_step=HEAD_DIM_STEP,
        workspace_alignment=WORKSPACE_ALIGNMENT, page_group_rows=PAGE_GROUP_ROWS, max_total_rows=MAX_TOTAL_ROWS,
    )  # fmt: skip
