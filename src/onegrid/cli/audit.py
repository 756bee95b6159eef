"""`onegrid audit`: where a checkpoint departs from a recipe, as stored and as engines would read it."""

from __future__ import annotations

from pathlib import Path

from onegrid.cli.plan import read_recipe
from onegrid.convert.contents import pattern
from onegrid.convert.source import open_source
from onegrid.errors import ConfigError
from onegrid.recipe import resolve
from onegrid.recipe.dialects.departures import Departure, departures
from onegrid.recipe.dialects.matchers import MATCHERS, READERS
from onegrid.recipe.rule import nearest


def run(checkpoint: Path, recipe: str, *, engines: tuple[str, ...] = (), full: bool = False) -> list[Departure]:
    """Print every departure and return them; empty if the checkpoint is what the recipe says.

    engines  readers of the configuration (keys of MATCHERS); empty for all that read its method
    full     a line for every tensor instead of one for all that differ in layer and expert alone
    """
    for engine in engines:
        if engine not in MATCHERS:
            raise ConfigError(f"no reader {engine!r}{nearest(engine, MATCHERS)}; readers: {', '.join(MATCHERS)}")
    source = open_source(checkpoint)
    shapes = source.shapes()
    plan = resolve(read_recipe(recipe), source.config, shapes)
    stored = {name: fmt for name, fmt in source.stored_quantizers().items() if name in plan.tensors}
    found = departures(plan, source.declared, stored, engines=engines or None)
    readers = engines or (READERS[source.declared.method] if source.declared else ())
    print(f"{checkpoint} against {plan.recipe_name}, stored and as read by {', '.join(readers) or 'nobody'}:")
    lines: dict[str, int] = {}
    for departure in found:
        name = departure.tensor if full else pattern(departure.tensor)
        line = f"{name}: {departure.where}: planned {departure.planned}, found {departure.found}"
        lines[line] = lines.get(line, 0) + 1
    for line, count in lines.items():
        print(f"  {line}{f' ({count} tensors)' if count > 1 else ''}")
    tensors = len({departure.tensor for departure in found})
    print(
        f"{tensors} of {len(plan.tensors)} tensors depart" if found else f"all {len(plan.tensors)} tensors as planned"
    )
    return found
