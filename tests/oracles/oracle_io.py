"""Reader and comparison of the recorded cases of this folder.

Every *.json file is a list of cases: {id, function, peer, peer_version, peer_ref, inputs, kwargs, expected,
rtol, atol, note}. A tensor is {"t": dtype, "shape": […], "v": nested list} with "nan", "inf" and "-inf" as
strings; scalars, lists and dicts nest. ``expected`` holds outputs by name; a name starting with "grad_" is
d(loss)/d(that input).
"""

import json
import math
import pathlib

import torch

_DT = {"float64": torch.float64, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _num(x):
    if isinstance(x, list):
        return [_num(y) for y in x]
    return _SPECIAL.get(x, x) if isinstance(x, str) else x


def decode(x):
    if isinstance(x, dict):
        if set(x) == {"t", "shape", "v"}:
            return torch.tensor(_num(x["v"]), dtype=_DT[x["t"]]).reshape(x["shape"])
        return {k: decode(v) for k, v in x.items()}
    if isinstance(x, list):
        return [decode(y) for y in x]
    return x


def load(folder=None):
    """Yield every case with its inputs, kwargs and expected decoded."""
    folder = pathlib.Path(folder or pathlib.Path(__file__).parent)
    for path in sorted(folder.glob("*.json")):
        if path.name == "index.json":
            continue
        for case in json.loads(path.read_text()):
            yield {
                **case,
                "file": path.name,
                **{k: decode(case[k]) for k in ("inputs", "kwargs", "expected")},
            }


def mismatch(got, want, rtol=1e-6, atol=1e-8):
    """Compare two values, which may be nested. Return None if they are equal within tolerance (NaN equals
    NaN), else a line that describes the first difference.
    """
    if isinstance(want, dict):
        for k in want:
            m = mismatch(got[k], want[k], rtol, atol)
            if m:
                return f"{k}: {m}"
        return None
    if isinstance(want, list):
        if len(got) != len(want):
            return f"length {len(got)} != {len(want)}"
        return next(
            (m for m in (mismatch(g, w, rtol, atol) for g, w in zip(got, want, strict=True)) if m), None
        )
    if isinstance(want, torch.Tensor | float | int) and not isinstance(want, bool):
        want = torch.as_tensor(_num(want) if isinstance(want, str) else want)
        got = torch.as_tensor(got).detach()
        if got.shape != want.shape:
            return f"shape {tuple(got.shape)} != {tuple(want.shape)}"
        g, w = got.double(), want.double()
        ok = torch.isclose(g, w, rtol=rtol, atol=atol, equal_nan=True)
        if bool(ok.all()):
            return None
        return (
            f"max abs diff {float((g - w).abs()[~ok].max()):.3e} at {int((~ok).sum())} of {ok.numel()} places"
        )
    if isinstance(want, str) and want in _SPECIAL:
        return mismatch(torch.tensor(float(got)), torch.tensor(_SPECIAL[want]), rtol, atol)
    return None if got == want else f"{got!r} != {want!r}"
