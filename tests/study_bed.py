"""A made-up study: a manifest and the files of its runs, as a sweep leaves them."""

from __future__ import annotations

import json
from pathlib import Path

from bame_cli.studies.study import manifest_path


def study(name="imagenet_resnet50", scale="paper", seeds=(0, 1), **changed) -> Path:
    """A manifest with runs of SR-STE and BAME at 1:16; `changed`: digest -> what its result says instead."""
    jobs = []
    for row, method in (("SR-STE", "srste"), ("BAME", "bame")):
        for seed in seeds:
            digest = f"{method}{seed}"
            jobs.append({"row": row, "overrides": [f"method={method}", "sparsity=1:16", f"seed={seed}"]})
            jobs[-1] |= {"folder": f"runs/{digest}", "digest": digest, "group": f"group-{method}", "seed": seed}
            jobs[-1] |= {"model": "resnet50", "dataset": "imagenet", "method": method, "pattern": "1:16"}
            flops = {"train": 40, "train_dense": 100, "train_ratio": 0.4, "train_ratio_dense_grad_input": 0.6}
            flops |= {"inference_ratio": 0.09, "inherited": 0}
            result = {"status": "finished", "digest": digest, "top1": 71.0 + seed, "flops": flops}
            if (said := changed.get(digest, {})) is not None:
                place = Path("outputs", "runs", digest)
                place.mkdir(parents=True)
                (place / "config.yaml").write_text("seed: <k>\n")
                rows = [{"flops": 20 * e, "top1": 60.0 + 5 * e + seed} for e in (1, 2)]
                (place / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
                (place / "digest").write_text(said.pop("digest", digest))
                (place / "result.json").write_text(json.dumps(result | said))
    path = manifest_path(Path("outputs"), name, scale)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"table": name, "scale": scale, "command": f"bame train +table={name}", "jobs": jobs}))
    return path
