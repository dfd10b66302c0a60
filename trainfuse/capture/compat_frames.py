"""How Dynamo takes one frame, and what becomes of a frame that it can't take by a fault of its own.

Nothing of a frame has run while it is traced, so that running it eagerly then is as if Dynamo had
not looked at it; random state and modes are put back by Dynamo itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

Rescue = Callable[[CodeType, Exception], bool]
"""Asked when tracing raised: whether the frame runs eagerly, False to let the error through."""


class _Frames(ConvertFrame):
    """Dynamo's own conversion of frames, whose errors are shown to `rescue` first.

    A frame that it lets run eagerly keeps the plans that it has, and no further call of it is
    traced; the frames that it calls are.
    """

    def __init__(self, backend: Any, hooks: Any, rescue: Rescue) -> None:
        super().__init__(backend, hooks)
        self._rescue = rescue

    @property
    def _clone_with_backend(self) -> Callable[[Any], ConvertFrame]:
        return lambda backend: _Frames(backend, self._hooks, self._rescue)

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> ConvertFrameReturn:
        try:
            return super().__call__(frame, *args, **kwargs)
        except Exception as error:
            asked_to_raise = self._inner_convert._box.error_on_graph_break
            if asked_to_raise or not self._rescue(frame.f_code, error):
                raise
        return ConvertFrameReturn(
            frame_exec_strategy=FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.DEFAULT)
        )


def compile_frames(
    fn: Callable[..., Any],
    backend: Callable[..., Any],
    rescue: Rescue,
    *,
    fullgraph: bool,
    dynamic: bool,
) -> Callable[..., Any]:
    """torch.compile, with a say in what becomes of a frame whose tracing raised.

    fullgraph: every error is raised, and `rescue` never asked.
    """
    context: Any = torch._dynamo.optimize(backend, nopython=fullgraph, dynamic=dynamic)
    if not fullgraph:
        outer = context.callback
        stock = outer._torchdynamo_orig_backend
        outer._torchdynamo_orig_backend = _Frames(
            stock._torchdynamo_orig_backend, stock._hooks, rescue
        )
    return context(fn)


def trace_again(code: CodeType) -> None:
    """Let Dynamo trace a frame again that was to run eagerly; its plans stay."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))
