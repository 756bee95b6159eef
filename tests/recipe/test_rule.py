"""The language in which rules name tensors."""

from __future__ import annotations

import pytest

from onegrid.errors import RecipeError
from onegrid.recipe import Rule
from onegrid.recipe.rule import layer_range, matches


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("layers.*.mlp.**", "model.layers.3.mlp.gate_proj.weight", True),
        ("model.layers.*.mlp.**", "model.layers.3.mlp.gate_proj.weight", True),
        ("layers.*.mlp", "model.layers.3.mlp.gate_proj.weight", True),
        ("layers.*.mlp.*", "model.layers.3.mlp.experts.0.up_proj.weight", True),
        ("layers.*.mlp.*.weight", "model.layers.3.mlp.experts.0.up_proj.weight", False),
        ("layers.1", "model.layers.10.mlp.down_proj.weight", False),
        ("**.mlp.**.weight", "model.layers.1.mlp.gate.weight", True),
        ("**", "lm_head.weight", True),
        ("layers.*.self_attn", "model.language_model.layers.1.self_attn.q_proj.weight", False),
        ("**.layers.*.self_attn", "model.language_model.layers.1.self_attn.q_proj.weight", True),
    ],
)
def test_a_pattern_matches_whole_components_from_the_first_on(pattern, name, covered):
    assert matches(pattern, name) is covered


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("mlp.gate", "mlp.gate_proj"),
        ("v_proj", "qkv_proj"),
        ("up_proj", "gate_up_proj"),
        ("lm_head", "mtp.lm_head"),
        ("norm", "q_norm"),
    ],
)
def test_case_R3_a_pattern_never_catches_part_of_a_component(short, long):
    assert matches(short, f"{short}.weight") and matches(long, f"{long}.weight")
    assert not matches(short, f"{long}.weight") and not matches(long, f"{short}.weight")
    if short != "lm_head":
        assert matches(f"**.{short}", f"model.layers.0.{short}.weight")
        assert not matches(f"**.{short}", f"model.layers.0.{long}.weight")


def test_case_R4_plain_and_glob_decide_alike_and_a_regular_expression_is_refused():
    names = [
        "vision_tower.encoder.blocks.0.mlp.fc0.weight",
        "vision_tower.weight",
        "model.layers.0.vision_tower2.weight",
    ]
    spellings = ["vision_tower", "vision_tower.**", "vision_tower.**.weight"]
    assert [[matches(s, n) for n in names] for s in spellings] == [[True, True, False]] * 3
    with pytest.raises(RecipeError, match=r"'re:vision_tower.\*' is a regular expression.*'vision_tower\.\*\*'"):
        matches("re:vision_tower.*", names[0])


@pytest.mark.parametrize(
    "pattern", ["layers.*.mlp.gate*", "*_proj", "", "a..b", ".a", "a.", "x.***", "a b", "{q,k}_proj"]
)
def test_what_is_outside_the_language_is_an_error(pattern):
    with pytest.raises(RecipeError, match="pattern"):
        Rule(match=pattern, weight=None, activation=None)


@pytest.mark.parametrize(
    ("text", "num_layers", "layers"),
    [
        ("3", 8, [3]),
        ("0-2", 8, [0, 1, 2]),
        ("first 1", 8, [0]),
        ("last 2", 8, [6, 7]),
        ("last 15%", 48, [40, 41, 42, 43, 44, 45, 46, 47]),
        ("last 15%", 20, [17, 18, 19]),
        ("last 15 %", 4, [3]),
        ("first 50%", 4, [0, 1]),
        ("last 9", 4, [0, 1, 2, 3]),
        ("first 0", 4, []),
    ],
)
def test_a_layer_range_counts_and_rounds_percentages_up(text, num_layers, layers):
    assert list(layer_range(text, num_layers)) == layers


@pytest.mark.parametrize("text", ["last", "2-1", "last 1.5", "15%", "-1", "first -1"])
def test_a_layer_range_that_is_none_is_an_error(text):
    with pytest.raises(RecipeError, match="layer range"):
        Rule(layers=(text,), weight=None, activation=None)


def test_a_rule_with_unknown_words_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'routed_expert'"):
        Rule(kinds=("routed_experts",), weight=None, activation=None)
    with pytest.raises(RecipeError, match="did you mean 'dequantized'"):
        Rule(weight="mxfp8", activation="mxfp8", backward="dequantised")
