"""The model and its tokenizer: new ones for bytes, or those of a local Hugging Face folder; and samples of its text.

Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GenerationConfig, set_seed

from lightstep.checkpoint.errors import list_names
from lightstep.checkpoint.huggingface import TiedWeightsDifferError, find_tensors
from lightstep.config import ConfigError
from lightstep.config_errors import one_sentence, suggest
from lightstep.trainer.config import Model, Sample

logger = logging.getLogger(__name__)


def load_tokenizer(model: Model) -> Any:
    """The folder's tokenizer; for a new model one token per byte (transformers' ByT5 tokenizer: 256 + pad, eos, unk).

    Raises:
        ConfigError: the folder is missing or has no tokenizer.
    """
    if model.path is None:
        return ByT5Tokenizer(extra_ids=0)
    folder = _folder(model.path)
    if not any(_is_tokenizer_file(file.name) for file in folder.iterdir()):
        raise ConfigError(
            f"model.path {folder} has no tokenizer; save one there: tokenizer.save_pretrained({str(folder)!r})"
        )
    with _as_config_error(f"model.path {folder}: its tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def model_config(model: Model, tokenizer: Any, length: int) -> Any:
    """The transformers configuration of the model.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or it does not fit the tokenizer or ``batch.length``.
    """
    if model.path is not None:
        with _as_config_error(f"model.path {model.path}: its configuration cannot be loaded"):
            config = AutoConfig.from_pretrained(_folder(model.path), local_files_only=True)
    else:
        config = _new_config(dict(model.config or {}), tokenizer, length)
    text = config.get_text_config()
    if text.vocab_size < len(tokenizer):
        raise ConfigError(f"model: vocab_size is {text.vocab_size}; its tokenizer needs at least {len(tokenizer)}")
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and longest < length:
        raise ConfigError(f"batch.length is {length}; the model reads at most {longest} (max_position_embeddings)")
    return config


def shardable_weights(model: Model, config: Any) -> Path | None:
    """The folder, if each rank can read its own shards from it: safetensors with the model's names. Otherwise None.

    Other folders (``pytorch_model.bin``, names that transformers converts) are read as a whole.
    """
    if model.path is None:
        return None
    folder = _folder(model.path)
    try:
        find_tensors(make_model(model, config, meta=True), folder)
    except TiedWeightsDifferError as error:
        raise ConfigError(f"model.path: {error}, in its config.json") from error
    except (FileNotFoundError, ValueError):
        return None
    return folder


def make_model(model: Model, config: Any, meta: bool = False) -> nn.Module:
    """New weights from torch's current seed, or the folder's in their own dtype.

    Args:
        meta: on the meta device, for a rank that receives weights from another rank or reads its shards later.
    """
    if model.path is not None and not meta:
        return _load_model(model.path)
    with torch.device("meta") if meta else contextlib.nullcontext(), _as_config_error("model.config"):
        made = AutoModelForCausalLM.from_config(config)
    if model.path is not None:
        with contextlib.suppress(OSError):  # no generation_config.json
            made.generation_config = GenerationConfig.from_pretrained(_folder(model.path), local_files_only=True)
    return made


def _load_model(path: str) -> nn.Module:
    """The model in a folder. transformers makes weights that are not there new ones, which is refused here."""
    with _as_config_error(f"model.path {path}: its weights cannot be loaded"):
        loaded, seen = AutoModelForCausalLM.from_pretrained(
            _folder(path), local_files_only=True, dtype="auto", output_loading_info=True
        )
    if missing := sorted(seen["missing_keys"]):
        raise ConfigError(
            f"model.path {path} has no {list_names(missing)}, which would begin with random values; give a folder with "
            f"all weights of {type(loaded).__name__}, or make one: from_pretrained(...), then save_pretrained(...)"
        )
    if unused := sorted(seen["unexpected_keys"]):
        logger.warning("model.path %s: not used, as the model has no such weights: %s", path, list_names(unused))
    return cast(nn.Module, loaded)


def _new_config(keys: dict[str, Any], tokenizer: Any, length: int) -> Any:
    kind = keys.pop("model_type")
    with _as_config_error(f"model.config.model_type is {kind!r}"):
        known = AutoConfig.for_model(kind).to_dict()
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ConfigError(f"model.config: {kind} has no key {unknown[0]!r}{suggest(unknown[0], sorted(known))}")
    end = tokenizer.eos_token_id
    defaults = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": length,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with _as_config_error("model.config"):
        return AutoConfig.for_model(kind, **{key: value for key, value in defaults.items() if key in known} | keys)


def _is_tokenizer_file(name: str) -> bool:
    """Without such a file, transformers may create an empty tokenizer."""
    return name.startswith(("tokenizer", "vocab", "tekken")) or name.endswith((".model", ".spm", ".tiktoken"))


def _folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"model.path {path} {what}; a local Hugging Face folder with weights and tokenizer is needed")
    return folder


@contextlib.contextmanager
def _as_config_error(what: str) -> Any:
    """Turn the various long errors of transformers into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {one_sentence(error)}") from error


def check_prompts(sample: Sample | None, tokenizer: Any) -> None:
    """Raise ``ConfigError`` if a prompt has no tokens: the model needs one to continue from."""
    for prompt in sample.prompts if sample is not None else ():
        if not len(tokenizer(prompt, add_special_tokens=False)["input_ids"]):
            raise ConfigError(f"sample.prompts: {prompt!r} has no tokens; at least one is needed to continue from")


@torch.no_grad()
def write_samples(model: nn.Module, tokenizer: Any, sample: Sample, seed: int) -> list[str]:
    """One text per prompt. All ranks of a sharded model call it, and all get the same texts.

    Args:
        model: anything with transformers' ``generate``.
    """
    set_seed(seed)
    model.eval()
    texts = []
    for prompt in sample.prompts:
        tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(next(model.parameters()).device)
        written: Any = model.generate(  # type: ignore[operator]
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            max_new_tokens=sample.tokens,
            do_sample=True,
            temperature=sample.temperature,
            top_k=sample.top_k,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        texts.append(_printable(tokenizer.decode(written[0].tolist(), skip_special_tokens=True)))
    return texts


def _printable(text: str) -> str:
    """Replace control characters, which could affect the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in text)
