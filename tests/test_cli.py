import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import hipjax
from hipjax.cli import generate, main, runtime
from hipjax.cli.output import Terminal
from hipjax.text import TextStream

NANO = Path(hipjax.__file__).parent / "assets" / "nano"
PROMPT = "def fibonacci(n):"
BUDGET = 20
SHORT = ["--max-new-tokens", str(BUDGET)]

speculative_twin = hipjax.speculative_stream


@pytest.fixture(scope="module")
def model():
    return hipjax.load_nano(dtype="float32")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Keeps this process's settings of jax as they are."""
    for module in ("generate", "doctor"):
        monkeypatch.setattr(f"hipjax.cli.{module}.use_cache", lambda: None)


@pytest.fixture(scope="module")
def expected(model):
    ids = model.tokenizer.encode(PROMPT).ids
    return hipjax.speculative_generate(
        model.params, None, ids, config=model.config, max_new_tokens=BUDGET
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes copies of the bundled model, to be damaged."""

    def copied():
        folder = tmp_path_factory.mktemp("nano")
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            shutil.copy(NANO / name, folder)
        return folder

    return copied


def refused(capsys, *argv):
    """The one line on standard error with which bad input ends."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hipjax: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def pieces(tokenizer, ids, cuts):
    stream = TextStream(tokenizer)
    bounds = [0, *sorted(cuts), len(ids)]
    windows = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    return [stream.push(w) for w in windows] + [stream.end()]


@given(data=st.data(), text=st.text(max_size=40))
def test_any_windows_of_a_text_join_up_to_it(model, data, text):
    ids = model.tokenizer.encode(text).ids
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10))
    assert "".join(pieces(model.tokenizer, ids, cuts)) == text


@given(data=st.data(), ids=st.lists(st.integers(0, 300), max_size=30))
def test_any_windows_of_any_tokens_join_up_to_their_decoding(model, data, ids):
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10))
    assert "".join(pieces(model.tokenizer, ids, cuts)) == model.tokenizer.decode(ids)


@pytest.mark.parametrize("character", ["é", "€", "𝄞"])
def test_a_character_appears_when_its_last_byte_has_come(model, character):
    ids = model.tokenizer.encode(character).ids
    assert len(ids) == len(character.encode())
    shown = pieces(model.tokenizer, ids, range(1, len(ids)))
    assert shown == [*[""] * (len(ids) - 1), character, ""]


def test_bytes_that_never_complete_show_as_a_replacement_at_the_end(model):
    ids = model.tokenizer.encode("a𝄞").ids[:-1]
    assert pieces(model.tokenizer, ids, [1]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_bytes_that_never_complete_show_once_something_else_follows(model):
    broken = model.tokenizer.encode("𝄞").ids[:-1]
    ids = [*broken, *model.tokenizer.encode("a").ids]
    assert pieces(model.tokenizer, ids, [len(broken)]) == ["", "\N{REPLACEMENT CHARACTER}a", ""]


def test_a_decoder_that_looks_at_its_neighbours():
    vocab = {"▁one": 0, "▁two": 1, "three": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert pieces(tokenizer, [0, 1, 2], [1, 2]) == ["one", " two", "three", ""]


def test_a_stream_can_be_used_again_after_its_end(model):
    stream = TextStream(model.tokenizer)
    stream.push(model.tokenizer.encode("€").ids[:1])
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(model.tokenizer.encode("€").ids) == "€"
    assert stream.end() == ""


def test_text_then_statistics(model, expected, capsys):
    assert main(["generate", PROMPT, *SHORT]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    text, _, table = out.partition("\n\nStatistics")
    assert text == model.tokenizer.decode(expected.tokens.tolist())
    stats = expected.stats
    rows = dict(
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in table.splitlines()
        if line.startswith("│")
    )
    assert rows["tokens"] == str(BUDGET)
    assert rows["finish reason"] == "length (budget or context used up)"
    assert rows["windows"] == str(stats.windows)
    assert rows["tokens per window"] == f"{stats.tokens_per_window:.2f}"
    for depth in range(3):
        cell = rows[f"accepted at depth {depth + 1}"]
        accepted, drafted = stats.accepted_by_depth[depth], stats.drafted_by_depth[depth]
        assert cell.startswith(f"{accepted} of {drafted} (")
    assert float(rows["prefill"].split()[0]) > 0
    assert float(rows["tok/s"]) > 0


def test_json_lines(model, expected, capsys):
    assert main(["generate", PROMPT, *SHORT, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *windows, result = [json.loads(line) for line in out.splitlines()]
    assert all(
        set(w) == {"event", "text", "tokens", "drafted", "accepted"} and w["event"] == "window"
        for w in windows
    )
    assert set(result) == {"event", "text", "tokens", "finish_reason", "stats"}
    assert result["event"] == "result"
    assert result["tokens"] == expected.tokens.tolist()
    assert result["tokens"] == [i for w in windows for i in w["tokens"]]
    assert result["text"] == model.tokenizer.decode(result["tokens"])
    assert result["text"] == "".join(w["text"] for w in windows)
    assert result["finish_reason"] == "length"
    assert sum(w["drafted"] for w in windows) == result["stats"]["drafted"] > 0
    assert sum(w["accepted"] for w in windows) == result["stats"]["accepted"] > 0
    assert set(result["stats"]) == set(expected.stats.to_dict())


def test_compare(monkeypatch, capsys):
    # Saves compiling plain decoding; that it emits the same is for tests/spec to show.
    monkeypatch.setattr(hipjax, "plain_stream", speculative_twin)
    assert main(["generate", PROMPT, *SHORT, "--json", "--compare"]) == 0
    rates = json.loads(capsys.readouterr().out.splitlines()[-1])["compare"]
    assert rates["tokens_equal"] is True
    fast, slow = rates["speculative_tokens_per_second"], rates["plain_tokens_per_second"]
    assert fast > 0
    assert rates["speedup"] == fast / slow

    assert main(["generate", PROMPT, *SHORT, "--compare"]) == 0
    out = capsys.readouterr().out
    assert "× plain decoding" in out
    assert "same tokens" in out


def test_no_speculation(monkeypatch, expected, capsys):
    monkeypatch.setattr(hipjax, "plain_stream", speculative_twin)
    monkeypatch.setattr(hipjax, "speculative_stream", None)
    assert main(["generate", PROMPT, *SHORT, "--json", "--no-speculation"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tokens"] == expected.tokens.tolist()


def test_depth_and_end_of_text_reach_the_library(monkeypatch, capsys):
    given = {}

    def stream(*_, **options):
        given.update(options)
        yield shown([5], "stop")

    monkeypatch.setattr(hipjax, "speculative_stream", stream)
    assert main(["generate", PROMPT, "--mtp-k", "2", "--ignore-eos"]) == 0
    assert given["speculation"].mtp_k == 2
    assert given["sampling"].ignore_eos
    assert given["max_new_tokens"] == 128


def shown(tokens, reason=None):
    stats = hipjax.Stats(emitted=len(tokens))
    return hipjax.Window(np.array(tokens, np.int32), 0, 0, reason, stats)


def scripted(monkeypatch, *windows, error=None):
    """Replaces decoding by the given windows of tokens."""

    def stream(*_, **__):
        for index, tokens in enumerate(windows):
            yield shown(tokens, "stop" if index == len(windows) - 1 else None)
        if error is not None:
            raise error

    monkeypatch.setattr(hipjax, "speculative_stream", stream)


def test_a_character_is_never_split_over_windows(model, monkeypatch, capsys):
    ids = model.tokenizer.encode("a€").ids
    scripted(monkeypatch, *([i] for i in ids[:-1]))
    assert main(["generate", PROMPT, "--json"]) == 0
    *windows, result = map(json.loads, capsys.readouterr().out.splitlines())
    assert [w["text"] for w in windows] == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert result["text"] == "a\N{REPLACEMENT CHARACTER}"
    assert result["finish_reason"] == "stop"


def test_one_token_leaves_nothing_to_measure(monkeypatch, capsys):
    scripted(monkeypatch, [0])
    assert main(["generate", PROMPT]) == 0
    out = capsys.readouterr().out
    assert "stop (end of text)" in out
    assert "no window to measure" in out


def test_other_tokens_of_plain_decoding_are_a_failure(monkeypatch, capsys):
    scripted(monkeypatch, [5, 6, 7])
    monkeypatch.setattr(hipjax, "plain_stream", hipjax.speculative_stream)
    scripted(monkeypatch, [5, 6, 8])
    assert main(["generate", PROMPT, "--compare"]) == 1
    assert "plain decoding emitted other tokens from index 2 on" in capsys.readouterr().err


def test_an_unexpected_error_keeps_its_traceback(monkeypatch):
    scripted(monkeypatch, [5], error=ValueError("inside decoding"))
    with pytest.raises(ValueError, match="inside decoding"):
        main(["generate", PROMPT])


def test_ctrl_c(monkeypatch, capsys):
    scripted(monkeypatch, [5], error=KeyboardInterrupt())
    assert main(["generate", PROMPT]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_has_gone(monkeypatch, capsys):
    def gone(*_):
        raise BrokenPipeError

    scripted(monkeypatch, [5])
    monkeypatch.setattr(Terminal, "window", gone)
    assert main(["generate", PROMPT]) == 141
    assert capsys.readouterr().err == ""


def test_the_prompt_is_dim_on_a_terminal_and_controls_are_harmless(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal = Terminal()
    terminal.prompt("a\x1b[31m")
    terminal.window(shown([5]), "b\n\x07\x9b")
    assert capsys.readouterr().out == "\x1b[2ma␛[31m\x1b[22mb\n␇\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["translate"], "invalid choice: 'translate'"),
        (["generate"], "arguments are required: PROMPT"),
        (["generate", "a", "--deep"], "unrecognized arguments: --deep"),
        (["generate", "a", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", "a", "--recurrent", "q4"], "invalid choice: 'q4'"),
        (["generate", "a", "--implementation", "hip"], "invalid choice: 'hip'"),
        (["generate", "a", "--max-new-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "a", "--max-new-tokens", "0"], "max_new_tokens is 0; allowed: at least 1"),
        (["generate", "a", "--mtp-k", "0"], "mtp_k is 0; allowed: 1 to 10"),
        (["generate", "a", "--mtp-k", "11"], "mtp_k is 11; allowed: 1 to 10"),
        (["generate", "a", "--mtp-k", "2", "--no-speculation"], "not allowed with argument"),
        (["generate", "a", "--compare", "--no-speculation"], "not allowed with argument"),
        (["generate", ""], "prompt is empty"),
        (["generate", "a " * 5000], "at most 4095"),
        (["generate", "\udcff"], "PROMPT is not valid UTF-8"),
        (["generate", "a", "--model", "/nowhere"], "/nowhere is not a folder"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    assert message in refused(capsys, *argv)


def test_a_folder_without_a_checkpoint(tmp_path, capsys):
    assert "no such file" in refused(capsys, "generate", "a", "--model", str(tmp_path))


def test_a_truncated_checkpoint(checkpoint, capsys):
    folder = checkpoint()
    os.truncate(folder / "model.safetensors", 1_000_000)
    assert "truncated" in refused(capsys, "generate", "a", "--model", str(folder))


def test_many_misfits_are_told_in_one_line(checkpoint, capsys):
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert "misshapen" in refused(capsys, "generate", "a", "--model", str(folder))


def test_a_checkpoint_without_a_tokenizer(checkpoint, capsys):
    folder = checkpoint()
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(capsys, "generate", "a", "--model", str(folder))


def test_a_damaged_tokenizer(checkpoint, capsys):
    folder = checkpoint()
    (folder / "tokenizer.json").write_text("{")
    assert "not a tokenizer" in refused(capsys, "generate", "a", "--model", str(folder))


def test_a_model_without_a_head_cannot_draft(model, monkeypatch, capsys):
    plain = hipjax.load(NANO, head=False)
    monkeypatch.setattr(hipjax, "load", lambda *_, **__: plain)
    assert "no MTP head" in refused(capsys, "generate", "a", "--model", str(NANO))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Unable to initialize backend 'tpu'\n(set JAX_PLATFORMS)"), AssertionError()],
)
def test_a_platform_that_is_not_there(error, monkeypatch, capsys):
    def missing():
        raise error

    monkeypatch.setattr(jax, "devices", missing)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert "no device (JAX_PLATFORMS is 'tpu')" in refused(capsys, "generate", "a")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "no device" in report["platform"]["error"]
    assert "no device" in report["bundled_model"]["error"]


@pytest.mark.parametrize(("option", "dtype"), [("stored", "bfloat16"), ("float32", "float32")])
def test_weights_as_stored_or_widened(option, dtype):
    assert generate._load(None, option).params["lm_head"]["weight"].dtype == dtype


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "versions",
        "platform",
        "kernels",
        "operations",
        "cache",
        "bundled_model",
    }
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["hipjax"] == hipjax.__version__
    assert report["platform"]["backend"] == jax.default_backend()
    assert report["operations"]["row_product"]
    assert report["cache"] == {"folder": None}
    assert report["bundled_model"]["layers"] == 8

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "row_product" in out
    assert jax.__version__ in out


def test_doctor_tells_what_is_broken(monkeypatch, capsys):
    def broken():
        raise hipjax.CheckpointError("truncated")

    monkeypatch.setattr(hipjax, "load_nano", broken)
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bundled_model"] == {"error": "truncated"}


@pytest.fixture
def jax_settings():
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_is_private_to_the_user(jax_settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = runtime.use_cache()
    assert folder == tmp_path / "hipjax" / "xla"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)


@pytest.mark.parametrize("value", ["", "relative"])
def test_a_cache_home_that_is_not_absolute_does_not_count(
    value, jax_settings, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runtime.use_cache() == tmp_path / ".cache" / "hipjax" / "xla"


def test_the_users_own_settings_stay(jax_settings, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    assert runtime.use_cache() == Path("/elsewhere")
    jax.config.update("jax_enable_compilation_cache", False)
    assert runtime.use_cache() is None
    assert not any(tmp_path.iterdir())


def test_no_cache_where_none_can_be_made(jax_settings, monkeypatch, tmp_path):
    (tmp_path / "hipjax").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime.use_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def program(*argv, command=("-m", "hipjax")):
    return subprocess.Popen(
        [sys.executable, *command, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        text=True,
    )


def test_version():
    with program("--version") as process:
        assert process.communicate(timeout=60) == (f"hipjax {hipjax.__version__}\n", "")
    assert process.returncode == 0


def test_a_closed_pipe_ends_it_quietly():
    with program("doctor", "--json") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_ctrl_c_does_not_wait_for_the_compiler(monkeypatch, tmp_path):
    # A fresh cache, so that there is a compiler to wait for.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    code = """if True:
        import os, signal, sys, threading
        from hipjax.cli import generate, main

        def interrupted(windows, ahead=generate._ahead):
            threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
            return ahead(windows)

        generate._ahead = interrupted
        sys.exit(main())
        """
    with program("generate", PROMPT, command=("-c", code)) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130
