"""Flags and configuration files: what is understood, what is refused, and that it is said once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import get_args

import pytest
import yaml
from marks import fault

from domainpar import infer, prepare, train
from domainpar.testing import patient
from domainpar.tracking import command_line, config
from domainpar.tracking.command_line import parse, run_command
from domainpar.tracking.config import (
    MODELS,
    Conditions,
    ConfigError,
    InferConfig,
    PrepareConfig,
    TrainConfig,
    flag,
    resolved_yaml,
    session_arguments,
)
from domainpar.tracking.config.group import Group, fields_of
from domainpar.tracking.config.prepare import PartitionerName
from domainpar.tracking.config.rank_flags import GroupingName
from domainpar.tracking.config.texts import LayerPairs
from domainpar.tracking.events import source_table
from partitioners import GROUPINGS, PARTITIONERS

COMMANDS = [(train, TrainConfig), (prepare, PrepareConfig), (infer, InferConfig)]

LAUNCHER_VARIABLES = (
    "PMI_RANK",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK",
    "RANK",
    "WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
)

REFUSED_FLAGS = {  # by what they are: words, further values that the error names beside the flag, and the remedy
    "a flag nobody knows": ("--hiden 32", "unknown", "--hidden"),
    "a flag spelled with underscores": ("--graph_iters 3", "unknown", "--graph-iters"),
    "an abbreviated flag": ("--hidde=32", "unknown", "--hidden"),
    "a flag like no other": ("--batch-size 8", "unknown", "train --help"),
    "a flag of other commands": ("--tracks greedy", "infer train", "--help"),
    "one dash": ("-lr 1", "unknown", "--lr"),
    "a word without a flag": ("fast", "no flag", "--help"),
    "the dashes after which no flags come": ("-- --lr 1", "no flag", "--help"),
    "a flag without its value": ("--lr", "argument", "--help"),
    "a word for a number": ("--lr fast", "'fast' number", "--help"),
    "a fraction for a count": ("--max-steps 1.5", "'1.5' whole", "--help"),
    "nothing for a count": ("--epochs null", "'null' whole", "--help"),
    "a choice that is none": ("--mode niave", "'niave' halo naive", "naive"),
    "a negative count": ("--epochs -1", "-1; least 1", "--epochs"),
    "a negative rate": ("--lr -1e-3", "-0.001 above 0", "--lr"),
    "an infinite rate": ("--lr 1e400", "inf finite", "--lr"),
    "a width that is no multiple of 16": ("--hidden 50", "50 16", "48 or --hidden 64"),
    "naive without sectors": ("--mode naive", "naive without --sectors", "--sectors 8"),
    "no sectors": ("--sectors 0 --mode naive", "0; least 1", "--sectors 8x2"),
    "a grid without wedges": ("--sectors 0x2 --mode naive", "0x2;", "--sectors 8x2"),
    "half a grid of sectors": ("--sectors 8x --mode naive", "8x;", "--sectors 8x2"),
    "sectors without naive": ("--sectors 8", "8 --mode halo", "--mode naive"),
    "a GPU transport on CPU": ("--transport nccl --device cpu", "--device cpu", "--device cuda"),
    "no thread": ("--threads 0", "0; least 1", "omit --threads"),
    "bf16 of float64": ("--precision bf16 --dtype float64", "bf16 --dtype float64", "drop one"),
    "a precision that is none": ("--precision fp16", "full bf16", "bf16"),
    "to drop everything": ("--dropout 1", "1.0", "omit --dropout"),
    "to drop less than nothing": ("--dropout -0.1", "-0.1", "omit --dropout"),
    "no iteration kept": ("--recompute-every 0", "0; least 1", "omit --recompute-every"),
    "no memory": ("--memory-limit 0", "0.0", "omit --memory-limit"),
    "resume and overwrite": ("--resume --overwrite --out x", "--overwrite", "keep one"),
    "resume of no run": ("--resume", "without --out", "runs/0001"),
    "a weight that leaves one class": ("--true-weight 0", "0.0 above 0", "omit --true-weight"),
    "a target that is no mapping": ("--target 3", "mapping", "pt: [1, .inf]"),
    "a target that is no YAML": ("--target pt:[1", "pt:[1", "pt: [1, .inf]"),
    "a model that is none": ("--model acron", "'acron' interaction", "acorn"),
    "a model that left": ("--model agnn", "agnn", "--model examples.networks:AttentionNetwork"),
    "an optimiser that left": ("--optimizer lamb", "lamb", "--optimizer examples.optimizers:Lamb"),
    "code that is no name": ("--model mine:net()", "package.module:factory", "--help"),
    "what stands for code": ("--model own", "code", "--model package"),
    "a file that is not there": ("--config no-such.yaml", "no-such.yaml", "YAML file"),
}

REFUSED_FILES = {  # content, what the error names beside the file, and the remedy
    "an empty file": ("", "empty", "key: value"),
    "only comments": ("# lr: 1\n", "empty", "key: value"),
    "a list": ("- lr\n", "list", "key: value"),
    "YAML with a mistake": ("lr: 1\nmode: [halo\n", "line 3: YAML", "key: value"),
    "an unknown key": ("hiden: 32\n", "unknown hiden", "hidden"),
    "a key with dashes": ("graph-iters: 3\n", "unknown graph-iters", "graph_iters"),
    "a word for a number": ("lr: fast\n", "lr 'fast' number", "--help"),
    "a number for a switch": ("resume: 1\n", "resume 1; true false", "--help"),
    "nothing for a number": ("lr:\n", "lr null number", "default"),
    "a choice that is none": ("mode: niave\n", "halo naive", "naive"),
    "code": ("model: os:system\n", "data code", "--model os:system"),
    "an optimiser's code": ("optimizer: os:system\n", "code", "--optimizer os:system"),
    "a list of code": ("model: [os:system]\n", "data code", "as a flag"),
    "a target that is not quoted": ("target: {pt: [1, .inf]}\n", "target {'pt': text", "quote it"),
    "keys of another command": ("tiles: 3\nhits: 600\n", "tiles hits prepare train", "--help"),
    "a key of another command": ("tracks: cc\n", "tracks infer train", "--help"),
    "another file": ("config: more.yaml\n", "unknown config", "--help"),
    "values that exclude each other": ("mode: naive\n", "--mode naive without --sectors", "--sectors"),
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def trained_with(*argv: str) -> TrainConfig:
    return parse(TrainConfig, train.__doc__ or "", argv)


def refusal(capfd, *argv: str) -> tuple[str, str]:
    """The error and the hint that `train` prints for these words, which it must refuse with exit code 2."""
    assert train.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    error, hint = err.splitlines()
    return error, hint


@fault(11)
@pytest.mark.parametrize(("argv", "error", "hint"), REFUSED_FLAGS.values(), ids=REFUSED_FLAGS)
def test_refused_flags_name_the_flag_and_what_to_do(capfd, argv, error, hint):
    printed = refusal(capfd, *argv.split())
    assert printed[0].startswith("domainpar: error: ")
    assert printed[1].startswith("hint: ")
    assert argv.split()[0].partition("=")[0] in printed[0] + printed[1]
    assert all(value in printed[0] for value in error.split())
    assert hint in printed[1]


@fault(11, 12)
@pytest.mark.parametrize(("text", "error", "hint"), REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_refused_files_name_the_file_the_key_and_what_to_do(capfd, tmp_path, text, error, hint):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    printed = refusal(capfd, "--config", str(path))
    assert all(value in printed[0] for value in error.split())
    assert hint in printed[1]
    assert str(path) in printed[0] or "--" in error


def test_a_file_that_is_not_text_and_a_folder_are_refused(capfd, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    assert "not text in UTF-8" in refusal(capfd, "--config", str(tmp_path / "binary"))[0]
    assert "directory" in refusal(capfd, "--config", str(tmp_path))[0]


@fault(12)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hidden: 16\nlr: 0.1\nhidden: 32\n", "hidden .* 1 and 3"),
        ("'hidden': 16\nhidden: 16\n", "hidden .* 1 and 2"),
        (
            "input_dir: d\nweighting:\n- weight: 2\n  conditions:\n    y: true\n    pt: [1, .inf]\n    y: false\n",
            "y .* 5 and 7",
        ),
        ("target: 'pt: [1, 2], pt: [1, 3]'\n", "--target .*: pt "),
    ],
)
def test_a_key_given_twice_in_a_file_is_refused_with_both_lines(capfd, tmp_path, text, said):
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    error, hint = refusal(capfd, "--config", str(path))
    assert re.search(said, error)
    assert "keep one" in hint


@pytest.mark.parametrize(
    ("words", "said", "instead"),
    [
        (["--target", "pt: 1"], "pt equal to 1", "'pt: [1, .inf]'"),
        (["--target", "nhits: 5, eta: 0.5"], "eta equal to 0.5", "'[is, 0.5]'"),
        (["--weighting", "[{weight: 2, conditions: {y: true, pt: 1}}]"], "pt equal to 1", "[1, .inf]"),
    ],
)
def test_a_real_number_that_is_to_be_equal_is_refused_with_what_was_meant(capfd, words, said, instead):
    error, hint = refusal(capfd, *words)
    assert words[0] in error
    assert said in error
    assert instead in hint


def test_whole_numbers_and_what_says_that_it_is_equal_may_be_equal():
    assert Conditions("nhits: 5, charge: -1, pt: [is, 1.5], primary: true").value["nhits"] == 5


def test_every_flag_of_the_commands_is_understood():
    config = trained_with(
        *"--store s --out o --mode naive --sectors 8 --grouping metis --domain-size 2 --events-per-step 3".split(),
        *"--model interaction-node-first --hidden 32 --graph-iters 2 --epochs 7 --max-steps 9 --lr 1e-4".split(),
        *"--dtype float64 --transport gloo --device cpu --seed 5 --overwrite --weight-decay 0 --clip 1".split(),
        *"--warmup 4 --lr-schedule cosine --true-weight 3".split(),
        *"--shared-weights --log-every 1 --checkpoint-every 20 --threads 3 --dropout 0.25 --recompute-every 2".split(),
        *"--readouts all".split(),
        *("--target", "pt: [1, .inf]"),
    )
    assert config == TrainConfig(
        store="s", out="o", mode="naive", sectors=8, grouping="metis", domain_size=2, events_per_step=3,
        model="interaction-node-first", hidden=32, graph_iters=2, epochs=7, max_steps=9, lr=1e-4,
        dtype="float64", transport="gloo", device="cpu", seed=5, overwrite=True, weight_decay=0.0, clip=1.0,
        warmup=4, lr_schedule="cosine", true_weight=3.0,
        shared_weights=True, log_every=1, checkpoint_every=20, threads=3, dropout=0.25, recompute_every=2,
        readouts="all", target="pt: [1, .inf]",
    )  # fmt: skip
    assert trained_with("--shared-weights", "--no-shared-weights").shared_weights is False
    on_gpu = trained_with(*"--precision bf16 --device cuda --strict".split())
    assert (on_gpu.precision, on_gpu.strict) == ("bf16", True)
    assert trained_with("--strict", "--no-strict").strict is False
    prepared = parse(
        PrepareConfig,
        "",
        "--source trackml --input d --store s --events 3 --partitioner phi-eta --tiles 64 --val-split 0.2 "
        "--test-split 0 --phi-slope 0.001 --z0 100 --layer-pairs 8.2-8.4 --same-layer --seed 1 "
        "--overwrite --report".split(),
    )
    assert (prepared.tiles, prepared.same_layer, prepared.report, prepared.test_split) == (64, True, True, 0.0)
    inferred = parse(InferConfig, "", "--run r --store s --out o --checkpoint last --split val --transport mpi".split())
    assert (inferred.run, inferred.checkpoint, inferred.split, inferred.transport) == ("r", "last", "val", "mpi")
    assert parse(InferConfig, "", ["--threads", "2"]).threads == 2


@pytest.mark.parametrize(("command", "config_class"), COMMANDS)
def test_without_flags_every_field_has_its_default(command, config_class):
    assert parse(config_class, command.__doc__, []) == config_class()


@pytest.mark.parametrize("order", [0, 1])
def test_a_flag_wins_over_the_file_wherever_it_stands(tmp_path, order):
    path = tmp_path / "train.yaml"
    path.write_text("lr: 1e-2\nhidden: 32\nshared_weights: true\n")
    words = [["--config", str(path)], ["--lr", "0.5"]]
    config = trained_with(*words[order], *words[1 - order])
    assert (config.lr, config.hidden, config.shared_weights) == (0.5, 32, True)


@pytest.mark.parametrize("config_class", [TrainConfig, PrepareConfig, InferConfig])
def test_the_resolved_file_gives_the_same_configuration_again(tmp_path, config_class):
    given = {"lr": 1e-5, "target": "pt: [1, .inf]", "clip": 2.0, "phi_slope": 1e-3, "val_split": 0.25, "split": "val"}
    fields = {field.name for field in dataclasses.fields(config_class)}
    config = config_class(**{name: value for name, value in given.items() if name in fields})
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert parse(config_class, "", ["--config", str(path)]) == config


def test_the_resolved_file_says_what_is_computed_and_not_how_the_command_was_started():
    kept = yaml.safe_load(resolved_yaml(TrainConfig(out="runs/7", overwrite=True)))
    everything = {field.name for field in dataclasses.fields(TrainConfig)}
    assert everything - set(kept) == {"out", "resume", "overwrite", "verify"}


@pytest.mark.parametrize(("command", "config_class"), COMMANDS)
def test_help_explains_every_flag_under_a_heading_and_ends_with_examples(capsys, command, config_class):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    body, examples = text.split("Examples:")
    assert f"python -m {command.__name__}" in examples
    assert text.splitlines()[2] == command.__doc__.splitlines()[0]
    explained = {line.split()[0].strip(",") for line in body.splitlines() if line.startswith("  --")}
    assert {flag(field.name) for field in dataclasses.fields(config_class)} <= explained
    undocumented = [line for line in body.splitlines() if line.startswith("  --") and line.endswith("None")]
    assert undocumented == []


@pytest.mark.parametrize(("command", "config_class"), COMMANDS)
def test_the_schema_has_every_key_with_its_type_bounds_and_meaning(capsys, command, config_class):
    with pytest.raises(SystemExit) as ended:
        command.main(["--schema"])
    assert ended.value.code == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(config_class)}
    assert schema["additionalProperties"] is False
    assert all(it["description"] for it in schema["properties"].values())
    if config_class is TrainConfig:
        assert schema["properties"]["hidden"] | {"description": ""} == {
            "type": "integer", "minimum": 1, "default": 64, "description": "",
        }  # fmt: skip
        assert schema["properties"]["mode"]["enum"] == ["halo", "naive"]
        assert schema["properties"]["target"]["anyOf"] == [{"type": "string"}, {"type": "null"}]


@pytest.mark.parametrize(
    ("words", "offered"),
    [(["tra"], {"train"}), (["train", "--hidd"], {"--hidden"}), (["train", "--mode", ""], {"halo", "naive"})],
)
def test_a_shell_completes_commands_flags_and_words(tmp_path, words, offered):
    from domainpar.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["--completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(printed.getvalue())
    typed = ["domainpar", *words]
    line = (
        f"source {tmp_path}/completion.bash; COMP_WORDS=({' '.join(map(repr, typed))}); COMP_CWORD={len(words)}; "
        f"_shtab_domainpar domainpar '{typed[-1]}' {typed[-2]}; echo ${{COMPREPLY[@]}}"
    )
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert set(ended.stdout.split()) == offered


def test_a_shell_without_completion_is_refused_with_those_that_have_one(capsys):
    from domainpar.__main__ import main

    assert main(["--completion", "ksh"]) == 2
    assert "'ksh'" in (said := capsys.readouterr().err)
    assert "bash, zsh" in said


def test_every_field_has_a_docstring_and_a_checked_group():
    for _, config_class in COMMANDS:
        for group in config_class.__bases__:
            described = {name for name, text in command_line._docstrings(group).items() if text}
            assert issubclass(group, Group)
            assert described == set(group.__annotations__)


ALL = [
    getattr(config, f"{name}Config") for name in "Doctor Estimate Export ImportAcorn Infer Prepare Report Train".split()
]


@pytest.mark.parametrize("config_class", ALL)
def test_rules_name_flags_and_values_that_there_are(config_class):
    """A slip in a rule would refuse nothing, or everything."""
    flags = fields_of(config_class)
    for rule in (rule for group in config_class.__mro__ for rule in vars(group).get("RULES", ())):
        for terms in (getattr(rule, name, "") for name in ("flags", "without", "beside")):
            for name, _, value in (term.partition(" ") for term in terms.split(", ") if term):
                assert name in flags
                assert value in ("", *flags[name].choices) or str in flags[name].kinds


def test_what_a_preset_sets_is_named_as_its_own_where_it_means_nothing():
    with pytest.raises(ConfigError, match=r"--module-map build .*--preset full.*--source pyg"):
        parse(PrepareConfig, "", ["--preset", "full", "--source", "pyg", "--input", "d"])


def test_a_text_with_a_meaning_stays_a_text_for_files_and_for_other_ranks():
    config = TrainConfig(aux="pt:0.1", target="pt: [1, .inf]")
    assert (config.aux, config.aux.value) == ("pt:0.1", {"pt": 0.1})
    assert "aux: pt:0.1\n" in resolved_yaml(config)
    assert json.dumps(config.target) == '"pt: [1, .inf]"'
    for copy in (pickle.loads(pickle.dumps(config)), dataclasses.replace(config, seed=0)):
        assert copy == config
        assert copy.target.value == {"pt": [1, float("inf")]}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--clip null", "clip", None),
        ("--clip 1e-2", "clip", 0.01),
        ("--hidden 064", "hidden", 64),
        ("--resume no", "resume", False),
        ("--store on", "store", "on"),
    ],
)
def test_a_word_is_read_as_its_field_would_have_it(tmp_path, words, name, value):
    path = tmp_path / "train.yaml"
    path.write_text("clip: 2\nhidden: 32\nresume: true\nout: o\n")
    assert getattr(trained_with("--config", str(path), "--out", "o", "--resume", "no", *words.split()), name) == value


def test_only_the_first_rank_talks(capfd, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "3")
    assert train.main(["--lr", "x"]) == 2
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert train.main(["--lr", "x"]) == 2
    assert capfd.readouterr().err.count("domainpar: error:") == 1


def test_what_the_work_refuses_ends_like_a_wrong_flag_and_its_exit_code_is_passed_on(capfd):
    def refuse(config):
        raise ConfigError("no such store: x", "prepare it first")

    assert run_command(InferConfig, refuse, "", []) == 2
    assert capfd.readouterr().err == "domainpar: error: no such store: x\nhint: prepare it first\n"
    assert run_command(InferConfig, lambda config: 1, "", []) == 1


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"source": "trackml"}, "--source trackml .*without --input"),
        ({"input": "d"}, "with --source simulate"),
        ({"source": "pyg", "input": "d", "hit_inefficiency": 0.1}, "--hit-inefficiency 0.1 .*with --source pyg"),
        ({"hit_inefficiency": 1.0}, "--hit-inefficiency is 1.0;.* at least 0 and below 1"),
        ({"hits": 499}, "at least 500"),
        ({"val_split": 0.5, "test_split": 0.6}, "--val-split 0.5 and --test-split 0.6 "),
        ({"val_split": 1.1}, "at least 0 and at most 1"),
        (
            {"source": "trackml", "input": "d", "module_map": "build", "val_split": 0, "test_split": 1},
            "--module-map build .*--val-split 0.0 and --test-split 1.0 ",
        ),
        ({"phi_slope": 0.0}, "above 0"),
        ({"z0": float("nan")}, "above 0"),
        ({"layer_pairs": "8.2-8.4, 8-9"}, "'8-9'"),
        ({"tiles": 0}, "at least 1 and at most 65,536"),
        ({"tiles": 100_000}, "at least 1 and at most 65,536"),
        ({"hits": 499_999_999}, "at least 500 and at most 1,000,000"),
    ],
)
def test_prepare_refuses_what_cannot_be_prepared(given, error):
    with pytest.raises(ConfigError, match=error) as refused:
        PrepareConfig(**given)
    assert refused.value.hint


def test_the_first_step_has_no_less_time_than_the_others():
    """NCCL's own limit, which is set where ranks meet, holds for all of a run."""
    assert session_arguments(TrainConfig(timeout=600.0))["timeout"] == 600.0
    assert session_arguments(TrainConfig(timeout=5.0))["timeout"] == 300.0


def test_layer_pairs_and_target_are_read_as_they_are_written():
    assert LayerPairs("8.2-8.4, 8.4 - 13.2").value == (((8, 2), (8, 4)), ((8, 4), (13, 2)))
    assert Conditions("pt: [1, .inf], nhits: [3, 5]").value == {"pt": [1, float("inf")], "nhits": [3, 5]}
    assert Conditions("{pdgid: [not_in, [11, -11]]}").value == {"pdgid": ["not_in", [11, -11]]}


def run_python(*words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if ranks > 1 and not mpiexec.exists():
        pytest.skip("the mpich wheel is not installed")
    launch = [str(mpiexec), "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [*launch, sys.executable, *words], capture_output=True, text=True, timeout=patient(60), check=False
    )


@contextlib.contextmanager
def nobody_reads(monkeypatch):
    """A pipe in place of the standard output, whose reader has gone as `head` goes."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        yield
        print("more, which goes nowhere", flush=True)


@pytest.mark.parametrize("printing", [lambda config: print("first") or 0, lambda config: print("first", flush=True)])
def test_a_reader_that_goes_early_ends_a_command_without_words(monkeypatch, capfd, printing):
    with nobody_reads(monkeypatch):
        assert run_command(TrainConfig, printing, None, []) == 1
    assert capfd.readouterr().err == ""


def test_so_it_ends_ranks_at_work(monkeypatch, capfd, tmp_path):
    with nobody_reads(monkeypatch):
        assert prepare.main(["--events", "1", "--hits", "500", "--store", str(tmp_path / "store")]) == 1
    said = capfd.readouterr().err.splitlines()
    assert [line for line in said if not line.startswith("compiling: ")] == []  # whichever test is the first compiles


def test_another_pipe_that_nobody_reads_is_an_error():
    def write(config):
        reader, writer = os.pipe()
        os.close(reader)
        os.write(writer, b"to nobody")

    with pytest.raises(BrokenPipeError):
        run_command(TrainConfig, write, None, [])


def test_without_standard_output_a_command_does_its_work(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command(TrainConfig, lambda config: 0, None, []) == 0


@fault(11)
def test_four_ranks_speak_with_one_voice_under_mpiexec():
    helped = run_python("-m", "domainpar.train", "--help", ranks=4)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.count("usage:") == 1
    refused = run_python("-m", "domainpar.train", "--mode", "niave", ranks=4)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(r"domainpar: error: .*--mode.*'niave'.*\nhint: .*naive.*\n", refused.stderr)


@pytest.mark.parametrize(("device", "driver", "level"), [("auto", True, "ERROR"), ("auto", False, "FATAL")])
def test_torchs_own_errors_are_shown_where_ranks_may_be_on_gpus(monkeypatch, tmp_path, device, driver, level):
    """What NCCL says of a GPU is worth reading; pages about ranks that have gone are not."""
    monkeypatch.setattr(command_line, "_DRIVERS", tmp_path)
    (tmp_path / ("nvidia0" if driver else "nvidiactl")).touch()
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "to be set")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    assert run_command(TrainConfig, lambda config: 0, None, ["--device", device]) == 0
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == level


def test_the_flags_name_the_partitioners_and_groupings_that_there_are():
    assert get_args(PartitionerName) == PARTITIONERS
    assert get_args(GroupingName) == GROUPINGS


def test_help_and_the_pages_say_what_each_source_and_each_network_is():
    docs = Path(__file__).parents[2] / "docs"
    flags, sources, networks = (
        (docs / page).read_text(encoding="utf-8")
        for page in ("reference/flags.md", "your_data.md", "recipes/model_train.md")
    )
    assert "\n".join(source_table.page()) in sources, "python docs/write_reference.py writes docs/your_data.md anew"
    for name in source_table.SOURCES:
        assert f" {name}: " in flags, f"{name}: python docs/write_reference.py writes docs/reference/flags.md anew"
    of_models = flags.partition("  --model MODEL ")[2].partition("or your own")[0]
    for name in MODELS:
        assert name in re.findall(r"[\w-]+", of_models), name
        assert f"`{name}`" in networks, name


@pytest.mark.parametrize("command", [module.__name__ for module, _ in COMMANDS])
def test_help_is_there_before_the_heavy_libraries(command):
    heavy = {"torch", "numba", "zarr", "mpi4py", "pandas", "yaml"}
    program = (
        f"import sys, {command} as command\n"
        "try: command.main(['--help'])\n"
        f"finally: print('LOADED', sorted({heavy} & set(sys.modules)))"
    )
    # Seconds of the processor: those on the clock depend on what else the machine does.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = run_python("-c", program)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "LOADED []" in ended.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_frame_reads_the_words_of_this_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--seed", "3"])
    seen = []
    assert command_line.run_command(TrainConfig, lambda config: seen.append(config) or 0, "") == 0
    assert seen[0].seed == 3


def test_a_choice_that_may_be_left_out_is_explained_like_any_other():
    with pytest.raises(ConfigError, match="--partitioner .*'metiss'.* phi, eta, phi-eta, metis") as caught:
        parse(PrepareConfig, "", ["--partitioner", "metiss"])
    assert "metis?" in caught.value.hint


def test_sectors_are_a_number_or_a_grid_of_wedges_and_slices(tmp_path):
    given = {text: trained_with("--mode", "naive", "--sectors", text).sectors for text in ("8", "8x2")}
    assert given == {"8": 8, "8x2": "8x2"}
    for sectors in given.values():
        file = tmp_path / "again.yaml"
        file.write_text(resolved_yaml(TrainConfig(mode="naive", sectors=sectors)))
        assert trained_with("--config", str(file)).sectors == sectors
    assert parse(InferConfig, "", ["--run", "r", "--border-sectors", "8x2"]).border_sectors == "8x2"
    with pytest.raises(ConfigError, match="--border-sectors is 8x; .*grid"):
        InferConfig(border_sectors="8x")


def test_edges_reach_four_widths_of_a_wide_beam_spot_unless_told_otherwise():
    from domainpar.prepare import _cuts

    for words, z0 in (
        ({}, 200),
        ({"beam_spot": "0, 5.44"}, 200),
        ({"beam_spot": "-10, 60"}, 250),
        ({"source": "acts", "simulate": 1, "beam_spot": "0, 5, 60"}, 240),
        ({"beam_spot": "0, 60", "z0": 100}, 100),
    ):
        assert _cuts(PrepareConfig(**words)).z0 == z0, words
