# SPDX-License-Identifier: Apache-2.0
"""Members are names of the package, synonyms are no members, and nothing ambiguous is guessed."""

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr import enums


def test_members_are_names_of_the_package():
    names = {name for enum in enums.ENUMS for name in enum.__members__}
    for name in names:
        owners = enums.owners_of(name)
        if len(owners) == 1:
            assert getattr(hugectr, name) is owners[0]
        else:
            with pytest.raises(AttributeError, match=rf"{name} is ambiguous: write \w+\.{name} or"):
                getattr(hugectr, name)


def test_synonyms_are_not_members():
    assert hugectr.Layer_t.DotProduct is hugectr.Layer_t.ElementwiseMultiply
    assert hugectr.Layer_t.Multiply is hugectr.Layer_t.WeightMultiply
    assert not {"DotProduct", "Multiply"} & set(hugectr.Layer_t.__members__)
    assert hugectr.CPUMemoryHashMapAlgorithm_t.phm is hugectr.DatabaseHashMapAlgorithm_t.phm
    assert hugectr.DataSourceType_t.HDFS is hugectr.FileSystemType_t.HDFS


def test_members_are_hashable_and_no_two_enumerations_are_equal():
    members = [member for enum in enums.ENUMS for member in enum]
    assert len(set(members)) == len(members)


def test_an_unknown_name_points_at_the_page():
    with pytest.raises(AttributeError, match=r"no 'Layer_x': docs/hugectr-compat.md"):
        _ = hugectr.Layer_x


def test_an_unknown_member_is_guessed():
    with pytest.raises(AttributeError, match=r"Layer_t has no 'Relu', did you mean 'ReLU'"):
        _ = hugectr.Layer_t.Relu
    with pytest.raises(AttributeError, match=r"Check_t has no 'CRC32', expected one of Sum, Non"):
        _ = hugectr.Check_t.CRC32
    assert not hasattr(hugectr.Layer_t, "_ipython_display_")


def test_a_member_is_a_number_where_one_is_needed():
    assert [int(member) for member in hugectr.Check_t] == [member.value for member in hugectr.Check_t]
    assert ["a", "b", "c"][hugectr.Update_t.LazyGlobal] == "c"
