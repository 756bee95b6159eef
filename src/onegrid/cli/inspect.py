"""`onegrid inspect`: what a checkpoint holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from onegrid.convert.contents import Content, contents, pattern
from onegrid.convert.source import Source, open_source


def run(checkpoint: Path, *, reference: Path | None = None, full: bool = False) -> list[Content]:
    """Print formats, grids, sizes and exclusions; with a reference, the error of every kind of tensor against it.

    full  a line for every tensor instead of one for all that differ in layer and expert alone
    """
    source = open_source(checkpoint)
    rows = contents(source, None if reference is None else open_source(reference))
    table = [
        (
            "tensor",
            "count",
            "shape",
            "format",
            "scales",
            "bytes",
            *(("relative error", "max error") if reference else ()),
        )
    ]
    groups: dict[tuple, list[Content]] = {}
    for row in rows:
        key = (row.name if full else pattern(row.name), row.shape, row.fmt, row.grid)
        groups.setdefault(key, []).append(row)
    for (name, shape, fmt, grid), members in groups.items():
        numbers = (str(len(members)), "x".join(map(str, shape)) or "scalar", fmt, grid)
        size = str(sum(row.num_bytes for row in members))
        table.append((name, *numbers, size, *(_errors(members) if reference else ())))
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    table.insert(1, tuple("-" * width for width in widths))
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print()
    for line in _summary(source, rows):
        print(line)
    return rows


def _errors(members: list[Content]) -> tuple[str, str]:
    """The worst of the group."""
    relative = max(row.relative_error or 0.0 for row in members)
    return f"{relative:.3e}", f"{max(row.max_abs_error or 0.0 for row in members):.3e}"


def _summary(source: Source, rows: list[Content]) -> list[str]:
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.fmt] += row.num_bytes
    lines = [
        f"{len(rows)} tensors, {sum(sizes.values()) / 1e6:.1f} MB: "
        + ", ".join(f"{f} {n / 1e6:.1f} MB" for f, n in sizes.most_common())
    ]
    declared = source.declared
    if declared is None:
        lines.append("the configuration says nothing of quantization")
    else:
        said = ", ".join(f"{g.scheme.token} ({g.weight})" for g in declared.groups)
        lines.append(f"declared: {declared.method}, {said}; key/value cache {declared.kv_cache}")
        lines.append(f"left out by the configuration: {len(declared.excluded)} entries")
        lines += [
            f"  {name} ({count})" for name, count in Counter(pattern(f"{e}.")[:-1] for e in declared.excluded).items()
        ]
    extra = [row.name for row in rows if row.kind == "extra"]
    if extra:
        lines.append(f"beyond the main model: {', '.join(extra)}")
    return lines
