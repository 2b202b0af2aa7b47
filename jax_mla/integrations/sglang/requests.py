"""Refuses requests with status 400 that would crash the engine or get a nonsense answer."""

# pyright: reportMissingImports=false
# Type checkers need not have the engine.

from __future__ import annotations

from typing import Any, NoReturn

from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

NO_EMBEDDINGS = "Embeddings are not served: the model makes text."
_engine_check = TokenizerManager._validate_one_request


def check_tokens(manager: Any, request: Any, input_ids: list[int] | None) -> None:
    """Stand for `TokenizerManager._validate_one_request`.

    Raises:
      ValueError: there are no tokens, tokens that the vocabulary does not have, or a wish for
        log-probabilities.
    """
    _engine_check(manager, request, input_ids)
    if getattr(request, "return_logprob", False):
        raise ValueError("log-probabilities are not served: sglang-jax 0.1.0rc0 crashes on them.")
    if input_ids is not None:
        size = manager.model_config.vocab_size
        if not input_ids:
            raise ValueError("The input is empty: expected at least one token.")
        if min(input_ids) < 0 or max(input_ids) >= size:
            raise ValueError(
                f"input_ids: expected tokens from 0 to {size - 1}, got some from {min(input_ids)} "
                f"to {max(input_ids)}."
            )


def check_chat(serving: Any, request: Any) -> str | None:
    """Stand for `OpenAIServingChat._validate_request`: return what is wrong, or None."""
    if not request.messages:
        return "messages: expected at least one message, got none."
    has_tools = request.tools and request.tool_choice != "none"
    if has_tools and serving.tokenizer_manager.server_args.tool_call_parser is None:
        return "tools: expected none, since the server was started without --tool-call-parser."
    return None


def check_completion(_: Any, request: Any) -> str | None:
    """Stand for `OpenAIServingCompletion._validate_request`: return what is wrong, or None."""
    return "prompt: expected at least one token, got none." if request.prompt == [] else None


def refuse_embeddings(*_: Any) -> str:
    """Stand for the check of requests that want no text: say that they are not served."""
    return NO_EMBEDDINGS


def refuse_embedding(_: Any) -> NoReturn:
    """Stand for `EmbeddingReqInput.normalize_batch_and_arguments`, which 0.1.0rc0 lacks.

    Raises:
      ValueError: always.
    """
    raise ValueError(NO_EMBEDDINGS)
