"""`bough completion`: prints a shell script that completes commands, flags and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")
HEAD = {
    "bash": '# eval "$(bough completion bash)" in ~/.bashrc',
    "zsh": '# eval "$(bough completion zsh)" in ~/.zshrc',
    "fish": "# bough completion fish > ~/.config/fish/completions/bough.fish",
}


class Flag(NamedTuple):
    """A flag of a command."""

    name: str
    text: str  # the help text
    values: tuple[str, ...]  # the allowed values; empty if there is no fixed list
    takes_value: bool


def add_completion(parser: argparse.ArgumentParser, program: argparse.ArgumentParser) -> None:
    """Add the flags of `bough completion`, which completes the commands of a program."""
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")
    parser.set_defaults(program=program)


async def completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    commands = {name: list(flags_of(parser)) for name, parser in commands_of(arguments.program).items()}
    helps = texts_of(arguments.program)
    print(HEAD[arguments.shell])
    print("\n".join(fish(commands, helps) if arguments.shell == "fish" else bash(commands, arguments.shell)))
    return 0


def bash(commands: dict[str, list[Flag]], shell: str) -> Iterator[str]:
    """The script for bash, and for zsh, which loads its emulation of bash's completion first."""
    if shell == "zsh":
        yield "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
    yield "_bough() {"
    yield "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=''"
    yield "  if [ $COMP_CWORD -eq 1 ]; then"
    yield f"    words='{' '.join([*commands, '--help', '--version'])}'"
    yield "  else case ${COMP_WORDS[1]} in"
    for name, flags in commands.items():
        yield f"    {name}) case $before in"
        for flag in flags:
            if flag.takes_value:
                yield f"      {flag.name}) words='{' '.join(flag.values)}';;"
        yield f"      *) words='{' '.join(flag.name for flag in flags)}';;"
        yield "    esac;;"
    yield "  esac; fi"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    yield "complete -o default -F _bough bough"


def fish(commands: dict[str, list[Flag]], helps: dict[str, str]) -> Iterator[str]:
    """The script for fish."""
    for name, flags in commands.items():
        yield f"complete -c bough -n __fish_use_subcommand -f -a {name} -d {_quoted(helps.get(name, ''))}"
        for flag in flags:
            long = flag.name.removeprefix("--")
            values = f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
            where = f"complete -c bough -n '__fish_seen_subcommand_from {name}'"
            yield f"{where} {'-l ' + long if flag.name != long else '-f -a ' + long}{values} -d {_quoted(flag.text)}"


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a program's commands, by name."""
    (found,) = _commands_actions(parser)
    return dict(found.choices)


def texts_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The help text of each command."""
    (found,) = _commands_actions(parser)
    return {choice.dest: choice.help or "" for choice in found._choices_actions}


def flags_of(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    """The long flags of a command with their values; choices of positional arguments are listed as bare words."""
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        values = tuple(map(str, action.choices or ()))
        if names:
            yield Flag(names[0], (action.help or "").replace("%%", "%"), values, action.nargs != 0)
        else:
            yield from (Flag(value, "", (), False) for value in values)


def _commands_actions(parser: argparse.ArgumentParser) -> Sequence[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def _quoted(text: str) -> str:
    """A word of fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
