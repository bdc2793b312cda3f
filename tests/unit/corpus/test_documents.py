from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.records import (
    DocumentMaker,
    DomainNames,
    MalformedLineError,
    object_in,
)

names = st.sampled_from(["A", "B", "C", "", None, 7, "long" * 30])
sets = st.one_of(
    st.fixed_dictionaries({"set": names}),
    st.sampled_from(['{"set": "A"}', '{"set": "B"}', "{set", None, "A"]),
)
records: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries(
        {"text": st.text(max_size=4)}, optional={"meta": sets, "meta.set": names}
    ),
    st.fixed_dictionaries({"meta": st.just({"set": "A"})}, optional={"text": st.none() | names}),
    st.sampled_from([[], "text", 7, None]),
)


@pytest.mark.parametrize("domain", [None, "d"])
@pytest.mark.parametrize("domain_key", ["meta.set", None])
@settings(max_examples=200, deadline=None)
@given(several=st.lists(records, max_size=4))
def test_many_at_once_are_what_they_are_one_by_one(several, domain, domain_key):
    options = DomainOptions(
        domain_key=domain_key, rename_domain=(("A=a", "B=") if domain_key else (),)
    )
    lines = [orjson.dumps(record) for record in several]

    plain: Counter[str] = Counter()
    maker = DocumentMaker(
        domain, "train", SourceOptions(()), domain_key, DomainNames(options), plain
    )
    expected, malformed = [], 0
    for line in lines:
        try:
            expected.append(maker.from_record(object_in(line)))
        except MalformedLineError:
            malformed += 1

    fast: Counter[str] = Counter()
    maker = DocumentMaker(
        domain, "train", SourceOptions(()), domain_key, DomainNames(options), fast
    )
    found = maker.from_lines(lines)
    if found is None:  # for the plain way; text and domain that are strings never are
        assert malformed or any(not isinstance(record.get("text"), str) for record in several)
        return
    assert malformed == 0
    assert found == [document for document in expected if document is not None]
    assert fast == plain
