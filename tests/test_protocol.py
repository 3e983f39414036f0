"""The protocol has the fields it needs, agrees with the code's names, and every field is explained."""

import copy
import datetime
import re

import jsonschema
import pytest

from dualdeadline import manifest, paths, predictors, record
from dualdeadline.report import check

PROTOCOL = manifest.read_yaml("protocol.yaml")
TEXT = {"type": "string", "minLength": 5}
DATE = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
NAMES = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z_]+$"},
    "minItems": 1,
    "uniqueItems": True,
}
COUNTS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True}


def mapping(**fields):
    """All of these fields and no other."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


TEST = mapping(
    metric={"type": "string"},
    variants={"type": "array", "items": {"type": "string"}, "minItems": 1},
    direction={"enum": ["greater", "less"]},
    bound={"type": "number"},
    config={"type": "object", "additionalProperties": {"type": "array", "minItems": 1, "uniqueItems": True}},
)
HYPOTHESIS = mapping(
    name=TEXT,
    claim=TEXT,
    estimand=TEXT,
    support=TEXT,
    test=TEST,
    stage={"type": "string", "pattern": r"^\d\d_[a-z_]+$"},
)
# the model's own corpora go by one word, and the test says what is estimated
TARGET = mapping(**{key: value for key, value in HYPOTHESIS["properties"].items() if key != "estimand"})
TARGET["properties"]["test"] = mapping(
    **TEST["properties"] | {"config": {"type": "object", "additionalProperties": {"type": ["array", "string"], "minLength": 7}}}
)
AMENDMENT = mapping(date=DATE, results_seen={"type": "boolean"}, what=TEXT, why=TEXT)
SCHEMA = mapping(
    title=TEXT,
    fixed=DATE,
    question=TEXT,
    seen_before=TEXT,
    statistics=mapping(
        unit={"const": "prompt"},
        resamples={"type": "integer", "minimum": 1000},
        seed={"type": "integer"},
        interval={"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        paired={"const": True},
        timing=TEXT,
        several_comparisons=TEXT,
    ),
    splits=mapping(
        shares=mapping(**dict.fromkeys(("train", "validation", "test"), {"type": "number"})),
        train=TEXT,
        validation=TEXT,
        test=TEXT,
        replication=TEXT,
        ood=TEXT,
    ),
    corpora={"type": "object", "minProperties": 3, "additionalProperties": {"type": "object"}},
    decoding=mapping(
        new_tokens={"type": "integer"},
        min_new_tokens={"type": "integer"},
        steps=TEXT,
        sampling=mapping(**dict.fromkeys(("temperature", "top_p", "seed"), {"type": "number"})),
    ),
    policies=mapping(
        predictors=NAMES,
        ours={"type": "string"},
        baselines=NAMES,
        control={"type": "string"},
        caches=NAMES,
        cache_scopes=NAMES,
        cache_starts=NAMES,
        schedules=NAMES,
    ),
    grid=mapping(
        budgets=COUNTS,
        slots=mapping(min={"const": 1}, max={"type": "integer"}),
        slots_shown=COUNTS,
        horizons=COUNTS,
        seeds=COUNTS,
    ),
    hypotheses=mapping(**{f"H{number}": HYPOTHESIS for number in range(1, 8)}),
    confirmation=mapping(
        fixed=DATE,
        results_seen={"const": False},
        **dict.fromkeys(("seen_before", "question", "shared_expert", "splits"), TEXT),
        parameters={"type": "object", "minProperties": 1, "additionalProperties": {"type": "object", "minProperties": 1}},
        choices={"type": "object", "minProperties": 1},
        targets={"type": "object", "minProperties": 1, "additionalProperties": TARGET},
        allowed=TEXTS,
        forbidden=TEXTS,
    ),
    claims=mapping(allowed=TEXTS, forbidden=TEXTS),
    amendments={"type": "array", "items": AMENDMENT},
)


def test_protocol_has_every_field_and_no_other():
    jsonschema.validate(PROTOCOL, SCHEMA)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda p: p.pop("fixed"),
        lambda p: p["hypotheses"].pop("H2"),
        lambda p: p["hypotheses"]["H1"].pop("support"),
        lambda p: p["amendments"].append(
            {"date": "2026-12-01", "what": "more prompts", "why": "wide intervals"}
        ),
        lambda p: p["hypotheses"]["H4"]["test"].update(direction="smaller"),
        lambda p: p["confirmation"].update(results_seen=True),
        lambda p: p["confirmation"]["targets"]["C2"].pop("support"),
        lambda p: p.update(fixed="30 November"),
    ],
)
def test_schema_refuses_a_broken_protocol(break_it):
    broken = copy.deepcopy(PROTOCOL)
    break_it(broken)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_amendments_are_dated_after_the_protocol_and_in_order():
    dates = [PROTOCOL["fixed"], *(entry["date"] for entry in PROTOCOL["amendments"])]
    assert dates == sorted(dates)
    assert all(datetime.date.fromisoformat(date) for date in dates)


def test_names_are_those_of_the_code():
    policies = PROTOCOL["policies"]
    assert sorted(policies["predictors"]) == sorted(predictors.REGISTRY)
    assert {policies["ours"], policies["control"], *policies["baselines"]} <= set(policies["predictors"])
    assert sum(PROTOCOL["splits"]["shares"].values()) == pytest.approx(1)


def test_prediction_is_tested_against_every_baseline_at_every_horizon_ahead():
    test, policies = PROTOCOL["hypotheses"]["H2"]["test"], PROTOCOL["policies"]
    assert test["variants"] == [f"{policies['ours']}-{name}" for name in policies["baselines"]]
    assert test["config"]["horizon"] == [h for h in PROTOCOL["grid"]["horizons"] if h > 0]
    assert set(test["config"]["budget"]) <= set(PROTOCOL["grid"]["budgets"])


def keys(node) -> set[str]:
    """Every field name below a node, except the free ones: corpora, sources, config keys, what a notebook explains."""
    if not isinstance(node, dict):
        return set()
    found = set(node)
    for name, value in node.items():
        found |= set() if name in ("corpora", "config", "parameters", "choices") else keys(value)
    return found


def explained() -> set[str]:
    """Every word in backticks of the manifests' README, dotted names apart."""
    spans = re.findall(r"`([^`]+)`", (paths.MANIFESTS / "README.md").read_text(encoding="utf-8"))
    return {word for span in spans for word in re.split(r"[.,<>\s]+", span) if word}


@pytest.mark.parametrize("name", ["protocol.yaml", "models.yaml", "machines.yaml"])
def test_every_field_of_a_manifest_is_explained(name):
    found = manifest.read_yaml(name)
    fields = keys(found) if name == "protocol.yaml" else set().union(*map(keys, found.values()))
    ids = {f"{letter}{number}" for letter in "CH" for number in range(1, 8)} | {"slots", "min", "max", "temperature", "top_p"}
    assert fields - ids - explained() == set()


def test_every_column_of_records_is_explained():
    assert set(record.FIELDS) - explained() == set()


@pytest.mark.parametrize("path", sorted(paths.CORPORA.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_field_of_a_corpus_is_explained(path):
    fields = set().union(*(set(row) for row in manifest.read_jsonl(path)))
    assert fields - explained() == set()


def test_hypotheses_named_in_the_paper_exist():
    tex = check.body((paths.PAPER / "main.tex").read_text(encoding="utf-8"))
    assert {f"H{digit}" for digit in re.findall(r"\bH(\d)\b", tex)} <= set(PROTOCOL["hypotheses"])
