"""The list of commands that `onegrid --help` prints: by what a person wants to do, each with its whole sentence."""

from __future__ import annotations

import click

SECTIONS = {
    "Train": ("train", "eval", "watch", "report", "diagnose"),
    "Checkpoints and plans": ("plan", "convert", "inspect", "audit", "import", "export"),
    "Serve": ("serve",),
    "This machine, and proof": ("doctor", "formats", "faults", "bench", "version"),
    "The command line": ("config", "completion"),
}


class Commands(click.Group):
    """A group whose help has sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every command once; one that no section names stands under "Other"."""
        named = {name for names in SECTIONS.values() for name in names}
        other = tuple(name for name in self.list_commands(ctx) if name not in named)
        for title, names in {**SECTIONS, "Other": other}.items():
            found = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            if found:
                with formatter.section(title):
                    formatter.write_dl([(name, sentence(command)) for name, command in found])


def sentence(command: click.Command) -> str:
    """The first sentence of a command's help."""
    first = (command.help or "").strip().partition("\n\n")[0]
    return " ".join(first.split())
