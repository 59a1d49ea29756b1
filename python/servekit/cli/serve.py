"""`servekit-serve`: from a command line to `ServerArgs`, then the server."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from servekit.cli.config_file import read_config_file
from servekit.cli.flags import FLAGS, MODEL_FLAGS, OTHER, RANKS, Flag
from servekit.cli.flags import MODEL as MODEL_GROUP
from servekit.cli.options import Command, Option, Size, Texts, one_line
from servekit.cli.show_ranks import FORMS, show_ranks
from servekit.config.secrets import take_secrets
from servekit.config.server_args import CHOICES, ConfigError, ServerArgs, flag_of
from servekit.runtime.nodes.addresses import split_address, split_ports
from servekit.runtime.ranks import Sizes, make_ranks

PROGRAM = "servekit-serve"
ENV_PREFIX = "SERVEKIT"
SHOW_RANKS = "--show-ranks"
USAGE, INTERRUPTED = 2, 130


def parse(arguments: Sequence[str]) -> ServerArgs:
    """Settings from a command line, the environment and a configuration file, checked.

    Raises:
        click.ClickException: a flag is unknown or its value wrong.
        click.exceptions.Exit: `--help`, `--version` or `--show-ranks` was asked for and answered.
        ConfigError: values that can't be, by themselves or together.
    """
    command = make_command()
    # Alone it takes no value, not even the model behind it.
    spelled = [f"{each}={FORMS[0]}" if each == SHOW_RANKS else each for each in arguments]
    with command.make_context(PROGRAM, spelled, auto_envvar_prefix=ENV_PREFIX) as ctx:
        values = {name: value for name, value in ctx.params.items() if name not in ("config", "positional_model")}
        positional = ctx.params["positional_model"]
    if positional is not None:
        explicit = ctx.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
        if explicit and values["model"] != positional:
            raise click.UsageError(f"the model is named twice: {positional!r} and --model {values['model']!r}")
        values["model"] = positional
    form = values.pop("show_ranks")
    _spread_out(ctx, values)
    args = ServerArgs(**values)
    args.validate()
    ranks = make_ranks(Sizes.of(args))
    if form is not None:
        click.echo(show_ranks(ranks, form))
        raise click.exceptions.Exit
    # Only to see that they are fit; who serves takes them again.
    take_secrets(args)
    _check_nodes(args)
    return args


def _check_nodes(args: ServerArgs) -> None:
    """Whether nodes could meet.

    Raises:
        ConfigError: nothing says where, or what does is wrong.
    """
    if args.dist_init_addr is not None:
        split_address(args.dist_init_addr)
    elif args.nnodes > 1:
        raise ConfigError(f"--nnodes {args.nnodes} needs --dist-init-addr, where node 0 is met, such as 10.0.0.1:5000")
    if args.dist_port_range is not None:
        split_ports(args.dist_port_range)


def _spread_out(ctx: click.Context, values: dict[str, Any]) -> None:
    """Neighbours' flags that stand for several of ours, put in their place."""
    attn_dp, all_experts = values.pop("attn_dp_size"), values.pop("enable_expert_parallel")
    with_ray = values.pop("use_ray"), values.pop("distributed_executor_backend") == "ray"
    if any(with_ray):
        values["launcher"] = "ray"
    if values.pop("headless") and not values["node_rank"]:
        raise click.UsageError("--headless needs a --node-rank above 0: node 0 answers HTTP, and only node 0 does")
    if attn_dp is not None:
        given = ctx.get_parameter_source("data_parallel_size") is not click.core.ParameterSource.DEFAULT
        if given and values["data_parallel_size"] != attn_dp:
            raise click.UsageError(f"--attn-dp-size {attn_dp} and --data-parallel-size must be the same")
        values |= {"data_parallel_size": attn_dp, "enable_dp_attention": True}
    if all_experts:
        values["expert_parallel_size"] = max(values["tensor_parallel_size"] // values["moe_data_parallel_size"], 1)


def make_command() -> click.Command:
    """The command with all its flags."""
    params: list[click.Parameter] = [
        click.Argument(["positional_model"], required=False, metavar="[MODEL]"),
        Option([MODEL_FLAGS[0], "model"], aliases=MODEL_FLAGS[1:], group=MODEL_GROUP, hidden=True),
        *map(_option, FLAGS),
        Option(["--attn-dp-size"], group=RANKS, type=int, hidden=True),
        Option(["--enable-expert-parallel"], group=RANKS, is_flag=True, hidden=True),
        Option(["--use-ray"], group=RANKS, is_flag=True, hidden=True),
        Option(["--distributed-executor-backend"], group=RANKS, type=click.Choice(["mp", "ray"]), hidden=True),
        Option(["--headless"], group=RANKS, is_flag=True, hidden=True),
        Option(
            [SHOW_RANKS],
            group=RANKS,
            type=click.Choice(FORMS),
            allow_from_autoenv=False,
            metavar="",
            help="Print who would be what on all nodes, and exit; =json for programs.",
        ),
        Option(
            ["--config"],
            group=OTHER,
            type=click.Path(path_type=Path),
            metavar="FILE",
            is_eager=True,
            callback=_use_config_file,
            help="YAML or TOML with values for these flags.",
        ),
        Option(
            ["--version"],
            group=OTHER,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            allow_from_autoenv=False,
            callback=_print_version,
            help="Print version and build, and exit.",
        ),
    ]
    return Command(
        PROGRAM,
        params=params,
        help="Serve a language model over HTTP, as OpenAI's API.\n\n"
        "MODEL is a folder, a .gguf file or a hub id; without it, the demo model is served.",
        context_settings={"max_content_width": 110, "help_option_names": ["--help", "-h"]},
    )


def _option(flag: Flag) -> Option:
    """Click's option for a flag; type and default are those of the field."""
    default = getattr(_DEFAULTS, flag.field)
    name = flag_of(flag.field)
    kind: Any = _type_of(flag.field)
    if kind is bool:
        names = [f"{name}/--no-{name[2:]}", flag.field]
        text = f"{flag.help}  [{'on' if default else 'off'}]"
        return Option(names, aliases=flag.aliases, group=flag.group, default=default, help=text)
    if flag.field in CHOICES:
        kind = click.Choice(CHOICES[flag.field])
    elif flag.field in _SIZES:
        kind = Size()
    elif flag.field == "allowed_origins":
        kind = Texts()
    repeatable = isinstance(default, tuple)
    shown = _shown(flag, default)
    return Option(
        [name, flag.field],
        aliases=flag.aliases,
        group=flag.group,
        type=kind,
        default=default,
        multiple=repeatable,
        callback=_joined if repeatable else None,
        metavar=flag.metavar,
        help=f"{flag.help}  [{shown}]" if shown else flag.help,
    )


def _joined(ctx: click.Context, param: click.Parameter, value: tuple[str | tuple[str, ...], ...]) -> tuple[str, ...]:
    """Values of a repeatable flag in one; one spelling may bring several."""
    parts = [(each,) if isinstance(each, str) else each for each in value]
    return tuple(itertools.chain.from_iterable(parts))


def _shown(flag: Flag, default: Any) -> str:
    """What the help says of the default."""
    if flag.default is not None or default is None:
        return flag.default or ""
    if flag.field in _SIZES:
        return f"{default >> 20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


_SIZES = ("max_body_size", "resume_memory")
"""Fields that are bytes."""
_DEFAULTS = ServerArgs()
_HINTS = get_type_hints(ServerArgs)


def _type_of(field: str) -> Any:
    """str, int, float or bool; a field that may be None has the type of its other values."""
    hint = _HINTS[field]
    kinds: list[type] = [each for each in get_args(hint) if each is not type(None)]
    return kinds[0] if kinds else hint


def _use_config_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.default_map = read_config_file(value, ctx.command)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from servekit import _core

        click.echo("\n".join(f"{key}: {what}" for key, what in _core.build_info().items()))
        ctx.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of the console script; ends the process with the status that tells how it went."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        args = parse(arguments)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        click.echo(f"{PROGRAM}: error: {one_line(error, make_command())}", err=True)
        sys.exit(USAGE)
    except ConfigError as error:
        click.echo(f"{PROGRAM}: error: {error}", err=True)
        sys.exit(USAGE)
    try:
        if args.launcher == "ray":
            from servekit.runtime.ray_launcher import serve_on_ray

            status = serve_on_ray(args, arguments)
        else:
            from servekit.runtime.supervisor import serve

            status = serve(args)
    except KeyboardInterrupt:
        # Ctrl-C while modules are still being loaded: nothing has been made yet.
        status = INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
