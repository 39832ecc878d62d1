"""Text into documents, documents into two sides, sides into windows, windows into every step's batches."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from lightstep import ConfigError
from lightstep.trainer.config import Batch, Data
from lightstep.trainer.data import Batches, Windows, check_batch, load_corpus, split_documents, validation_rows


def _folder(tmp_path: Path, count: int = 40) -> Path:
    root = tmp_path / "text"
    root.mkdir()
    for number in range(count):
        (root / f"{number:02}.txt").write_text(f"file {number} " + "says é and so on. " * (number + 3))
    return root


def _written(root: Path, *names: str) -> Path:
    """Files that hold their names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def _text(tmp_path: Path, text: str) -> str:
    (tmp_path / "a.txt").write_text(text)
    return str(tmp_path / "a.txt")


def _all(data: Data) -> list[bytes]:
    training, validation = split_documents(data)
    return sorted(training + validation)


def _windows(count: int) -> Windows:
    return Windows(np.arange(count * 4, dtype=np.uint16).reshape(count, 4), 1.0)


# -- documents


def test_a_document_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    root = _folder(tmp_path)
    before = split_documents(Data(path=str(root), validation=0.3))
    (root / "00-new.txt").write_text("something new")
    (root / "copy.txt").write_bytes(before[1][0])
    after = split_documents(Data(path=str(root), validation=0.3))
    assert set(before[0]) <= set(after[0]) and set(before[1]) == set(after[1]) - {b"something new"}
    assert not set(after[0]) & set(after[1])
    assert len(after[1]) > 4, "the share that is held out"


def test_both_sides_get_something_of_very_few_documents(tmp_path: Path) -> None:
    for number in range(60):
        root = _written(tmp_path / str(number), "a.txt", f"{number}.txt")
        assert [len(side) for side in split_documents(Data(path=str(root)))] == [1, 1]


def test_one_text_file_is_cut_in_two(tmp_path: Path) -> None:
    training, validation = split_documents(Data(path=_text(tmp_path, "0123456789" * 10), validation=0.1))
    assert training[0] + validation[0] == b"0123456789" * 10 and len(validation[0]) == 10


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    names = ("b/z.md", "a.py", "c", ".git/config", "b/.hidden.txt", "site-packages/other.py")
    root = _written(tmp_path / "text", *names)
    (root / "image.txt").write_bytes(b"\x89PNG\0\0")
    (root / "empty.txt").write_text(" \n")
    assert _all(Data(path=str(root))) == [b"a.py", b"b/z.md", b"c"]
    assert _all(Data(path=str(root), suffixes=[".md", ".py"])) == [b"a.py", b"b/z.md"]


def test_the_default_text_is_the_standard_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("json/decoder.py", "doc/intro.rst", "notes.txt", "site-packages/torch/nn.py", "lib.so", "x/a.pyc")
    _written(tmp_path, *names)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    assert _all(Data()) == [b"doc/intro.rst", b"json/decoder.py", b"notes.txt"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "first", "body": 1}\n{"text": "second"}\n\n', ["first", "second"]),
        (b'\xef\xbb\xbf{"text": "first"}\n{"text": "second"}\n', ["first", "second"]),  # a byte-order mark
        (b'{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n{"text": "c\xffd"}\n', ["a\ufffdb", "c\ufffdd", "😀"]),
    ],
    ids=["one each", "byte-order mark", "no characters"],
)
def test_json_lines_hold_one_document_each(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    for key in ("text", "body"):
        path = tmp_path / f"{key}.jsonl"
        path.write_bytes(content.replace(b'"body"', b'"other"').replace(b'"text"', f'"{key}"'.encode()))
        assert _all(Data(path=str(path), text_key=key)) == [text.encode() for text in expected]


NO_TEXT = "no text under 'text' (data.text_key); it has"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "missing does not exist"),
        ("folder", None, "folder holds no text"),
        ("empty.txt", b"", "empty.txt holds no text"),
        ("binary.bin", b"ab\0cd", "binary.bin is not text"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y", "id": 1}\n', f"line 2: {NO_TEXT} body, id"),
        ("a.jsonl", b'{"text": 3}\n', f"line 1: {NO_TEXT}"),
        ("a.jsonl", b"[1]\n", f"line 1: {NO_TEXT} a list"),
        ("a.jsonl", b'{"text": "x"}\nnonsense\n', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "x"}\n', "only copies of one text"),
    ],
)
def test_unusable_text_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        split_documents(Data(path=str(path)))
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_settings_for_another_kind_of_path_are_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_text('{"body": "x"}')
    for path in (tmp_path, tmp_path / "a.txt"):  # a folder's files are read as they are, braces included
        with pytest.raises(ConfigError, match="text_key is 'body', the key of the text in one JSONL file"):
            split_documents(Data(path=str(path), text_key="body"))
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(ConfigError, match=r"data\.suffixes selects files of a folder"):
            split_documents(Data(path=str(tmp_path / name), suffixes=[".txt"]))


# -- tokens


def test_byte_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    text, tokenizer = "def f(x):\n\treturn 'é→x'\n" * 20, ByT5Tokenizer(extra_ids=0)
    corpus = load_corpus(Data(path=_text(tmp_path, text), validation=0.5), tokenizer, 8)
    expected = tokenizer(text).input_ids
    rows = corpus.training.rows(range(len(corpus.training)))
    assert rows.dtype == torch.int64 and rows.reshape(-1).tolist() == expected[: rows.numel()]
    assert corpus.training.bytes_per_token == corpus.validation.bytes_per_token == 1.0


def test_documents_are_separated_and_fingerprinted(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "a.jsonl", ByT5Tokenizer(extra_ids=0)
    path.write_text("".join(json.dumps({"text": f"{n:03}"}) + "\n" for n in range(50)))
    first, again = (load_corpus(Data(path=str(path), validation=0.3), tokenizer, 4) for _ in range(2))
    assert (first.training.rows(range(3))[:, -1] == tokenizer.eos_token_id).all()
    path.write_text(path.read_text().replace("007", "070"))
    other = load_corpus(Data(path=str(path), validation=0.3), tokenizer, 4)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_another_tokenizer_counts_its_bytes(tmp_path: Path) -> None:
    path = _text(tmp_path, "red green blue " * 40)
    corpus = load_corpus(Data(path=path, validation=0.5), word_tokenizer(), 4)
    assert corpus.training.rows([0]).tolist() == [[1, 2, 3, 1]]
    assert corpus.training.bytes_per_token == pytest.approx(5.0, rel=0.05)


def test_too_little_text_for_one_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"less than one window of 64 tokens \(batch.length\) for validation"):
        load_corpus(Data(path=_text(tmp_path, "x" * 100)), ByT5Tokenizer(extra_ids=0), 64)


def word_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<end>": 0, "red": 1, "green": 2, "blue": 3, "<unk>": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")


# -- batches


def test_an_epoch_sees_every_window_once_and_each_in_its_own_order() -> None:
    batches = Batches(_windows(12), Batch(sequences=4, length=4), seed=1, rank=0, world_size=1)
    epochs = [[int(i) for step in range(3 * e, 3 * e + 3) for i in batches.indices(step)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]


def test_a_step_is_the_same_whatever_was_read_before() -> None:
    def fresh(seed: int = 7) -> Batches:
        return Batches(_windows(10), Batch(sequences=4, length=4), seed=seed, rank=0, world_size=1)

    batches = fresh()
    in_order = [batches.step(step) for step in range(12)]
    assert all(torch.equal(fresh().step(step), in_order[step]) for step in (11, 0, 5))
    assert not torch.equal(fresh(8).step(0), in_order[0])


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 1), (2, 2), (4, 2)])
def test_ranks_share_one_global_batch(world_size: int, accumulation: int) -> None:
    windows = _windows(30)
    whole = windows.rows(Batches(windows, Batch(sequences=8, length=4), 3, 0, 1).indices(2))
    batch = Batch(sequences=8, length=4, accumulation=accumulation)
    parts = [Batches(windows, batch, 3, rank, world_size).step(2) for rank in range(world_size)]
    assert {tuple(part.shape) for part in parts} == {(accumulation, 8 // world_size // accumulation, 4)}
    assert torch.equal(torch.stack(parts, 1).reshape(8, 4), whole)


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch.sequences is 8; .* multiple of 6 \(batch.accumulation 3 × 2 ranks\)"):
        check_batch(Batch(sequences=8, length=4, accumulation=3), 2)


def test_ranks_validate_with_equally_many_windows_and_all_of_them_together() -> None:
    windows = _windows(9)
    parts = [validation_rows(windows, 8, rank, 2) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) == 4
    assert torch.equal(torch.stack(parts, 1).reshape(8, 4), validation_rows(windows, 8, 0, 1))
    assert len(validation_rows(_windows(1), 8, 1, 2)) == 1, "fewer windows than ranks"
