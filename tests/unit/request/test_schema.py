import json

import pytest

from torchrec_adaptive.request import Feature, FeatureSchema


def make_schema() -> FeatureSchema:
    return FeatureSchema(
        (
            Feature.bag("user", "request", 100, 8),
            Feature.bag("item", "candidate", 50, 8, table="items"),
            Feature.sequence("seen", 50, 8, table="items", max_length=20),
            Feature.dense("hour", "request", 2),
            Feature.dense("price", "candidate"),
        ),
        tasks=("click", "buy"),
    )


def test_sides_and_tables() -> None:
    schema = make_schema()
    assert [f.name for f in schema.request_bags] == ["user"]
    assert [f.name for f in schema.candidate_bags] == ["item"]
    assert [f.name for f in schema.sequences] == ["seen"]
    assert (schema.request_dense_width, schema.candidate_dense_width) == (2, 1)
    assert [(t.name, t.num_embeddings, t.feature_names) for t in schema.tables] == [
        ("user", 100, ("user",)),
        ("items", 50, ("item", "seen")),
    ]


def test_json_round_trip_keeps_the_fingerprint() -> None:
    schema = make_schema()
    again = FeatureSchema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again == schema
    assert again.fingerprint == schema.fingerprint
    assert FeatureSchema(schema.features, ("click",)).fingerprint != schema.fingerprint


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Feature.bag("x", "request", 0, 8), "num_embeddings=0"),
        (lambda: Feature.bag("x.y", "request", 5, 8), "without a dot"),
        (lambda: Feature.bag("x", "request", 5, 8, max_length=-1), "max_length=-1"),
        (lambda: Feature.bag("x", "request", 5, 8, pooling="max"), "pooling='max'"),
        (lambda: Feature.bag("x", "user", 5, 8), "'user' is not a valid Side"),
        (lambda: Feature.dense("x", "request", 0), "width=0"),
        (lambda: FeatureSchema((Feature.dense("x", "request"),) * 2), "come more than once"),
        (lambda: FeatureSchema((), tasks=()), "at least one task"),
        (
            lambda: FeatureSchema(
                (Feature.bag("a", "request", 5, 8, table="t"), Feature.sequence("b", 6, 8, table="t"))
            ),
            "one table has one size",
        ),
        (lambda: make_schema().feature("itm"), "did you mean 'item'"),
        (lambda: FeatureSchema.from_dict({"features": [{"nam": "x"}], "tasks": ["a"]}), "did you mean 'name'"),
        (lambda: FeatureSchema.from_dict({"features": []}), "'features' and 'tasks'"),
    ],
)
def test_a_wrong_schema_is_refused_with_the_value(build, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        build()
