"""The grammar of architectures; tests/config/test_fuzz_text.py draws whole expressions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parnas.architecture import LETTERS, MAX_BLOCKS, MAX_TEXT, Architecture
from parnas.errors import ParnasError

strings = st.text("sfi", min_size=1, max_size=40)


@given(strings)
def test_a_string_is_read_as_itself(letters):
    architecture = Architecture.parse(letters)
    assert str(architecture) == letters
    assert Architecture.parse(str(architecture)) == architecture
    assert len(architecture) == len(letters)
    assert list(architecture) == list(letters)


@pytest.mark.parametrize(
    "text, meaning",
    [
        ("(sf)*2", "sfsf"),
        (" s*1 f (sf) ", "sfsf"),
        ("((s)*2f)*2i", "ssfssfi"),
        ("((((s))))*3", "sss"),
        ("interleaved-5", "sfsfs"),
        ("all-f-3", "fff"),
        ("sandwich-8-0", "sfsfsfsf"),
        ("sandwich-8-2", "sssfsfff"),
        ("sandwich-8-4", "ssssffff"),
        ("interleaved-1", "s"),
    ],
)
def test_a_string_means_these_layers(text, meaning):
    assert str(Architecture.parse(text)) == meaning


def test_sandwich_keeps_the_number_of_each_letter():
    """Press et al. 2020 reorder an interleaved network."""
    interleaved = Architecture.parse("interleaved-16").counts()
    assert all(Architecture.parse(f"sandwich-16-{k}").counts() == interleaved for k in range(9))


def test_random_is_fixed_by_its_seed_and_uses_all_letters():
    found = [str(Architecture.parse(f"random-200-{seed}")) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert all(found[0].count(letter) > 40 for letter in "sfi")


@pytest.mark.parametrize("text", ["s" * MAX_BLOCKS, f"s*{MAX_BLOCKS}", "((s)*100)*10", f"all-f-{MAX_BLOCKS}"])
def test_the_largest_are_read(text):
    assert len(Architecture.parse(text)) == MAX_BLOCKS


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "1 to 1000 blocks, not 0"),
        ("   ", "1 to 1000 blocks, not 0"),
        ("sfx", "Unknown layer letter 'x'"),
        ("sF", "at character 2: 'F'"),
        ("sf,s", "at character 3: ',s'"),
        ("(sf", "leaves 1 bracket(s) open"),
        ("((sf)", "leaves 1 bracket(s) open"),
        ("sf)", "unmatched closing bracket at character 3"),
        ("s()f", "empty group, at character 3"),
        ("*2", "nothing to repeat before '*', at character 1"),
        ("(*2)", "nothing to repeat before '*', at character 2"),
        ("s*2*3", "nothing to repeat before '*', at character 4"),
        ("s*0", "'s' repeated 0 times"),
        ("(sf)*501", "'sf' repeated 501 times gives 1002 blocks"),
        ("s*1001", "'s' repeated 1001 times"),
        ("s*", "at character 2: '*'"),
        ("s*-1", "at character 2: '*-1'"),
        ("s" * (MAX_BLOCKS + 1), "more than 1000 blocks"),
        ("s*600 (s*600)", "more than 1000 blocks"),
        ("s" * (MAX_TEXT + 1), f"{MAX_TEXT + 1} characters long"),
        ("interleaved-0", "has 0 blocks"),
        ("interleaved-1001", "has 1001 blocks"),
        ("interleaved-4-2", "interleaved takes 1 number(s), not 2"),
        ("sandwich-8", "sandwich takes 2 number(s), not 1"),
        ("sandwich-7-1", "an even N and a K of at most N/2"),
        ("sandwich-8-5", "an even N and a K of at most N/2"),
        ("random-8", "random takes 2 number(s), not 1"),
        ("interleaved-", "at character 12: '-'"),
    ],
)
def test_mistakes_name_the_place_and_the_cure(text, message):
    with pytest.raises(ParnasError, match=re.escape(message)) as caught:
        Architecture.parse(text)
    assert len(str(caught.value)) < 400


def test_letters_are_checked_without_parsing_too():
    for letters in ("", "sx", "(sf)*2", "s" * (MAX_BLOCKS + 1)):
        with pytest.raises(ParnasError):
            Architecture(letters)


@given(strings)
def test_canonical_drops_identity_only(letters):
    kept = "".join(letter for letter in letters if letter != "i")
    if kept:
        canonical = Architecture(letters).canonical()
        assert str(canonical) == kept
        assert canonical.canonical() == canonical
    else:
        with pytest.raises(ParnasError):
            Architecture(letters).canonical()


def test_networks_that_differ_by_identity_are_one():
    assert Architecture("sifi").canonical() == Architecture("iisf").canonical() == Architecture("sf")


@pytest.mark.parametrize(
    "preset, expected",
    [
        ("alternating-6", "kfsfkf"),
        ("convolution-3", "kfk"),
        ("recurrence-4", "rfrf"),
        ("lfm2-16", "kgkgsgkgkgsgkgsg"),
        ("jamba-12", "rfrfrfrfsfrf"),
        ("samba-4", "r g s:window=64 g"),
    ],
)
def test_presets_of_hybrids(preset, expected):
    assert Architecture.parse(preset) == Architecture.parse(expected)


def test_counts_name_the_layers_of_the_architecture():
    assert Architecture("ssf").counts() == {"s": 2, "f": 1}


# Names with options


@st.composite
def names(draw):
    """A name as people may write it, and as it is kept."""
    letter = draw(st.sampled_from("sfi"))
    options = draw(st.lists(st.sampled_from(LETTERS[letter].options), unique=True)) if letter != "i" else []
    values = {option: draw(st.integers(1, 999_999)) for option in options}
    zeros = draw(st.sampled_from(["", "0"]))
    written = ",".join(f"{option}={zeros}{value}" for option, value in values.items())
    kept = ",".join(f"{option}={values[option]}" for option in LETTERS[letter].options if option in values)
    return (f"{letter}:{written}", f"{letter}:{kept}") if values else (letter, letter)


@given(st.lists(names(), min_size=1, max_size=8), st.integers(1, 3))
def test_names_with_options_are_read_back_as_they_are_written(pairs, times):
    written, kept = zip(*pairs, strict=True)
    architecture = Architecture.parse(f"({' '.join(written)})*{times}")
    assert architecture.layers == kept * times == tuple(architecture)
    assert architecture == Architecture(list(written) * times)
    assert Architecture.parse(str(architecture)) == architecture
    assert (" " in str(architecture)) == (any(len(name) > 1 for name in kept) and len(architecture) > 1)


@pytest.mark.parametrize(
    "text, meaning",
    [
        ("s:heads=2 f f:d_inner=512", "s:heads=2 f f:d_inner=512"),
        ("(s:heads=2)*2f", "s:heads=2 s:heads=2 f"),
        ("f:d_inner=8*2", "f:d_inner=8 f:d_inner=8"),
        ("s:d_head=16,heads=2", "s:heads=2,d_head=16"),
    ],
)
def test_a_string_with_options_means_these_layers(text, meaning):
    assert str(Architecture.parse(text)) == meaning


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "f s:heads=0",
            "'heads=0' is not of the form option=NUMBER, from 1 to 999999; s takes heads, d_head, kv_heads, window. "
            "This is at character 3",
        ),
        ("s:heads=-1", "'heads=-1' is not of the form option=NUMBER"),
        ("s:heads=2f", "'heads=2f' is not of the form option=NUMBER"),
        ("s:heads=٣", "is not of the form option=NUMBER"),
        ("s:heads=1000000", "is not of the form option=NUMBER"),
        ("s:", "'' is not of the form option=NUMBER"),
        ("s:heads=2,", "'' is not of the form option=NUMBER"),
        ("s:d_inner=3", "Option 'd_inner' is unknown; s takes heads, d_head"),
        ("s:heads=2,heads=3", "Option 'heads' is given twice"),
        ("i:heads=2", "Option 'heads' is unknown; i takes no options"),
        ("x:heads=2", "Unknown layer letter 'x'"),
        ("s:heads= 2", "at character 9: ' 2'"),
        ("s:" + "," * 500, "is not of the form option=NUMBER"),
        ("s:" + "h" * 5000, "'hhhhhhhhhhhhhhhhhhhhh...' is not of the form option"),
        ("s" * 1_000_000, "1000000 characters long"),
    ],
)
def test_mistakes_in_options_name_the_place_and_what_is_allowed(text, message):
    with pytest.raises(ParnasError, match=re.escape(message)) as caught:
        Architecture.parse(text)
    assert len(str(caught.value)) < 400


def test_the_longest_architecture_is_read_back():
    longest = Architecture(["s:heads=999999,d_head=999999"] * MAX_BLOCKS)
    assert Architecture.parse(str(longest)) == longest


def test_canonical_and_counts_with_options():
    architecture = Architecture.parse("i s:heads=2 f i s:heads=2")
    assert str(architecture.canonical()) == "s:heads=2 f s:heads=2"
    assert architecture.counts() == {"f": 1, "i": 2, "s:heads=2": 2}
