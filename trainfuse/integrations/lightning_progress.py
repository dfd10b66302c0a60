"""Progress-bar values that reach the host when somebody reads them.

After every batch Lightning turns each value logged with `prog_bar=True` into a Python number, be
there a progress bar or not, and so waits for the GPU at every step. Nothing reads those numbers but
`Trainer.progress_bar_metrics`: for the time of a fit they stay tensors until it is asked.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from torch import Tensor

from trainfuse.integrations.lightning_tree import part

_RESULTS = "trainer.connectors.logger_connector.result"
_CONVERT = "convert_tensors_to_scalars"


class _Late:
    """Goes before Lightning's class of the Trainer's logger connector.

    plain: that class. results: the module in which values are converted.
    """

    plain: type
    results: Any
    _progress_bar_metrics: dict[str, Any]

    def on_batch_end(self) -> None:
        """Collect what the batch logged, without a conversion."""
        with mock.patch.object(self.results, _CONVERT, lambda value: value):
            super().on_batch_end()  # pyright: ignore[reportAttributeAccessIssue]  # of `plain`

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """The values as numbers, which waits for the GPU."""
        kept, convert = self._progress_bar_metrics, getattr(self.results, _CONVERT)
        kept.update({name: convert(v) for name, v in kept.items() if isinstance(v, Tensor)})
        return super().progress_bar_metrics  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _late(plain: type, results: Any) -> type:
    return type(plain.__name__, (_Late, plain), {"plain": plain, "results": results})


def delay(trainer: Any) -> None:
    """Convert progress-bar values when they are read, from now on; undone by `restore`.

    A Lightning that does this in another way is left as it is.
    """
    connector, results = trainer._logger_connector, part(trainer, _RESULTS)
    if hasattr(results, _CONVERT) and hasattr(connector, "_progress_bar_metrics"):
        connector.__class__ = _late(type(connector), results)


def restore(trainer: Any) -> None:
    """Convert what is left, and give the Trainer back what it had. Harmless when called again."""
    connector = trainer._logger_connector
    if isinstance(connector, _Late):
        _ = connector.progress_bar_metrics
        connector.__class__ = connector.plain
