"""The examination as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from samestep.tools.common import format_bytes
from samestep.tools.doctor.section import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from samestep.tools.doctor.section import Section

MEGABYTE: Final = 1_000_000  # what is smaller tells of latency, not of bandwidth
TONES: Final = ("change", "note", "good")  # the most urgent first
_INDENT: Final = "  "


def as_text(sections: Sequence[Section]) -> str:
    """Return facts by section, then findings, the most urgent first."""
    lines = [line for section in sections for line in _section(section)]
    findings = [finding for section in sections for finding in section.findings]
    for finding in sorted(findings, key=lambda finding: TONES.index(finding.tone)):
        lines.append(f"{finding.tone:6}  {finding.text}")
        lines += [f"{'':6}  do: {finding.mend}"] if finding.mend else []
    count = sum(finding.tone == "change" for finding in findings)
    lines += ["", f"{some(count, 'thing')} to change" if count else "nothing has to be changed"]
    return "\n".join(lines)


def _section(section: Section) -> Iterator[str]:
    yield section.name
    width = max(map(len, map(_label, section.facts)), default=0)
    for name, value in section.facts.items():
        first, *rest = _lines(name, value)
        yield f"{_INDENT}{_label(name):{width}}  {first}"
        yield from (f"{_INDENT}{'':{width}}  {line}" for line in rest)
    yield ""


def _label(name: str) -> str:
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ")


def _lines(name: str, value: Any) -> list[str]:
    """Return a value in as many lines as it has parts."""
    if isinstance(value, (list, dict)) and not value:
        return ["none"]
    if isinstance(value, dict):
        return (
            [_time(value)]
            if "median_seconds" in value
            else [f"{_label(key)} {_word(key, part)}" for key, part in value.items()]
        )
    if isinstance(value, list) and isinstance(value[0], dict):
        return [
            ", ".join(
                _word(key, part) if key == "name" else f"{_label(key)} {_word(key, part)}"
                for key, part in item.items()
            )
            for item in value
        ]
    return [_word(name, value)]


def _word(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_word("", part) for part in value) or "none"
    if name.endswith("_bytes") and not isinstance(value, str):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _time(figure: Mapping[str, Any]) -> str:
    """Return a median with its spread and, of many bytes, how many that is a second."""
    middle, low, high = (
        1e3 * figure[f"{name}_seconds"] for name in ("median", "lowest", "highest")
    )
    text = f"{middle:.4g} ms" + (
        f" ({low:.4g} to {high:.4g}, {figure['times']} times)" if figure["times"] > 1 else ""
    )
    nbytes = figure["bytes"] or 0
    return (
        f"{text}, {nbytes / figure['median_seconds'] / 1e9:.3g} GB/s" if nbytes > MEGABYTE else text
    )
