"""What runs inside vLLM's worker: vLLM mixes this class into its own and calls the methods by name.

Arguments and answers are plain data. Tensors are read from the file of shared memory that the adapter has written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


class OnegridWorker:
    """Methods for `collective_rpc`, all with a prefix of their own."""

    def onegrid_open(self, folder: str, road: str, hf_config: dict[str, Any], plan: str) -> None:
        """Maps the canonical bytes and finds every tensor's place in the model."""
        from onegrid.model.spec import ModelSpec
        from onegrid.recipe import Plan
        from onegrid.sampler.vllm.places import places
        from onegrid.sampler.vllm.store import map_file, tensors_of
        from onegrid.sampler.vllm.verify import Inside

        table = json.loads((Path(folder) / "table.json").read_text(encoding="utf-8"))
        data = map_file(Path(folder) / "canonical", (Path(folder) / "canonical").stat().st_size)
        config = self.vllm_config  # type: ignore[attr-defined]
        self._onegrid_folder = Path(folder)
        self._onegrid = Inside(
            model=self.model_runner.get_model(),  # type: ignore[attr-defined]
            tensors=tensors_of(data, table),
            places=places(ModelSpec.from_hf_config(hf_config)),
            plan=Plan.from_json(plan),
            road=road,  # type: ignore[arg-type]
            dtype=config.model_config.dtype,
            device=torch.device(self.device),  # type: ignore[attr-defined]
        )
        from onegrid.sampler.vllm.load import settle_buffers

        settle_buffers(self._onegrid)
        self._onegrid.kept = self._onegrid.others()  # before the first reload, which may spoil them as any other

    def onegrid_load(self) -> None:
        """Takes the canonical bytes into the model, in place."""
        from vllm.config import set_current_vllm_config

        from onegrid.sampler.vllm.load import load

        config = self.vllm_config  # type: ignore[attr-defined]
        with set_current_vllm_config(config), torch.no_grad():
            load(self._onegrid, config.model_config)
        if not self._onegrid.addresses:
            self._onegrid.addresses = self._onegrid.where()

    def onegrid_remember(self) -> None:
        """Notes addresses and buffers of an engine that has loaded its weights by itself."""
        self._onegrid.remember()

    def onegrid_verify(self) -> list[tuple[str, str, str]]:
        """See `verify.verify`."""
        from vllm.config import set_current_vllm_config

        from onegrid.sampler.vllm.verify import verify

        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            return verify(self._onegrid)

    def onegrid_describe(self, prove: bool) -> dict[str, dict[str, Any]]:
        """See `live.describe`."""
        from vllm.config import set_current_vllm_config

        from onegrid.sampler.vllm.live import describe

        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            return describe(self._onegrid, prove)

    def onegrid_multiply(self, key: str) -> None:
        """Replaces the matrix in the exchange file by its product with one linear, bias included."""
        from onegrid.sampler.vllm.launch import load, save
        from onegrid.sampler.vllm.verify import multiply

        path = self._onegrid_folder / "exchange"
        save(path, multiply(self._onegrid, key, load(path)))

    def onegrid_keep_logits(self) -> None:
        """See `logits.KeptLogits`."""
        from onegrid.sampler.vllm.logits import KeptLogits

        self._onegrid_logits = KeptLogits(self.model_runner.get_model())  # type: ignore[attr-defined]

    def onegrid_kept_logits(self) -> list[int]:
        """Keeps none any more. Shape of the last, which are in the exchange file if there are any; [] for none."""
        from onegrid.sampler.vllm.launch import save

        last = self._onegrid_logits.release()
        del self._onegrid_logits
        if last is None:
            return []
        save(self._onegrid_folder / "exchange", last)
        return list(last.shape)

    def onegrid_graphs(self, on: bool) -> None:
        """Lets the runner replay captured graphs, or not. Not run here.

        vLLM has two runners: the older one asks a dispatcher for a mode and a batch, the newer one a manager, which
        has a batch without a graph for whatever comes before its graphs are captured.
        """
        runner = self.model_runner  # type: ignore[attr-defined]
        if not hasattr(runner, "cudagraph_dispatcher"):
            runner.cudagraph_manager._graphs_captured = on
            return
        dispatcher = runner.cudagraph_dispatcher
        if on:
            dispatcher.__dict__.pop("dispatch", None)
            return
        from vllm.config import CUDAGraphMode

        original = type(dispatcher).dispatch

        def plain(*arguments: Any, **named: Any) -> Any:
            _, *rest = original(dispatcher, *arguments, **named)
            return (CUDAGraphMode.NONE, *rest)

        dispatcher.dispatch = plain
