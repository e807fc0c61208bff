"""Reader for the requirements of a shared object: libraries, symbol versions, and symbols without a version.

The reader accepts 64-bit little-endian ELF files of any CPU, and needs no system tool.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, visibility, section, value, size
_DYNAMIC = struct.Struct("<qQ")  # tag, value
_NEED = struct.Struct("<HHIII")  # version, number of versions, file, offsets of the first version and the next need
_NEED_VERSION = struct.Struct("<IHHII")  # hash, flags, index, name, offset of the next version
_DYNSYM, _DYNAMIC_TYPE, _VERSYM, _VERNEED = 11, 6, 0x6FFFFFFF, 0x6FFFFFFE
_DT_NEEDED, _WEAK, _UNVERSIONED = 1, 2, 1  # _UNVERSIONED: greatest version index without a version name
MACHINES = {62: "x86_64", 183: "aarch64"}


@dataclass(frozen=True, slots=True)
class SharedObject:
    """Requirements and symbols of a shared object.

    Attributes:
        machine: the CPU of the file, such as "x86_64".
        libraries: names of the libraries that are loaded with the file.
        versions: needed version names, such as "GLIBC_2.17", each with the symbols of the version.
        unversioned: undefined symbols without a version. Weak symbols may be missing, and are left out.
        defined: symbols for use by different files.
    """

    machine: str
    libraries: tuple[str, ...]
    versions: dict[str, tuple[str, ...]]
    unversioned: frozenset[str]
    defined: frozenset[str]

    def above(self, ceilings: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
        """Return the needed versions above the ceilings, with the symbols. A name without a ceiling is not returned.

        Args:
            ceilings: the greatest allowed number for each version name without number, such as "GLIBC".
        """
        symbols_by_version = {}
        for version, symbols in self.versions.items():
            name, _, number = version.rpartition("_")
            if name in ceilings and tuple(map(int, re.findall(r"\d+", number))) > ceilings[name]:
                symbols_by_version[version] = symbols
        return symbols_by_version


def read(data: bytes) -> SharedObject:
    """Read the bytes of a shared object.

    Raises:
        ValueError: the bytes are not a 64-bit ELF file.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("read: data must be an ELF file of 64 bits in little endian, but got other bytes")
    (machine,) = struct.unpack_from("<H", data, 18)
    sections = _sections(data)
    by_type = {section[1]: section for section in sections}
    names = _versions_by_index(data, by_type.get(_VERNEED), sections)
    symbols = list(_symbols(data, by_type, sections))
    versions: dict[str, list[str]] = {name: [] for name in names.values()}
    for name, _, is_defined, index in symbols:
        if not is_defined and index in names:
            versions[names[index]].append(name)
    return SharedObject(
        MACHINES.get(machine, str(machine)),
        tuple(_libraries(data, by_type.get(_DYNAMIC_TYPE), sections)),
        {name: tuple(sorted(users)) for name, users in versions.items()},
        frozenset(
            name for name, is_weak, is_defined, index in symbols
            if name and not is_defined and not is_weak and index <= _UNVERSIONED
        ),
        frozenset(name for name, _, is_defined, _ in symbols if is_defined),
    )  # fmt: skip


def read_file(path: Path) -> SharedObject:
    """Read a shared object from a file.

    Raises:
        ValueError: the file is not a 64-bit ELF file.
    """
    return read(path.read_bytes())


def _sections(data: bytes) -> list[tuple[int, ...]]:
    (offset,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    return [_SECTION.unpack_from(data, offset + number * _SECTION.size) for number in range(count)]


def _text(data: bytes, strings: tuple[int, ...], offset: int) -> str:
    start = strings[4] + offset
    return data[start : data.index(b"\0", start)].decode()


def _symbols(
    data: bytes, by_type: dict[int, tuple[int, ...]], sections: list[tuple[int, ...]]
) -> Iterator[tuple[str, bool, bool, int]]:
    """Yield (name, is weak, is defined, index of the version) for each dynamic symbol."""
    table = by_type[_DYNSYM]
    strings = sections[table[6]]
    count = table[5] // _SYMBOL.size
    indices = struct.unpack_from(f"<{count}H", data, by_type[_VERSYM][4]) if _VERSYM in by_type else (0,) * count
    for number in range(count):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(data, table[4] + number * _SYMBOL.size)
        yield _text(data, strings, name), info >> 4 == _WEAK, section != 0, indices[number] & 0x7FFF


def _libraries(data: bytes, dynamic: tuple[int, ...] | None, sections: list[tuple[int, ...]]) -> Iterator[str]:
    if dynamic is not None:
        for start in range(dynamic[4], dynamic[4] + dynamic[5], _DYNAMIC.size):
            tag, value = _DYNAMIC.unpack_from(data, start)
            if tag == _DT_NEEDED:
                yield _text(data, sections[dynamic[6]], value)


def _versions_by_index(data: bytes, needs: tuple[int, ...] | None, sections: list[tuple[int, ...]]) -> dict[int, str]:
    names: dict[int, str] = {}
    start = needs[4] if needs is not None else 0
    for _ in range(needs[7] if needs is not None else 0):
        _, count, _, first, following = _NEED.unpack_from(data, start)
        place = start + first
        for _ in range(count):
            _, _, index, name, step = _NEED_VERSION.unpack_from(data, place)
            names[index & 0x7FFF] = _text(data, sections[needs[6]], name)
            place += step
        start += following
    return names
