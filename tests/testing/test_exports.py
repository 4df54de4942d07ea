import fulltilt.testing


def test_every_exported_name_is_there():
    assert sorted(fulltilt.testing.__all__) == fulltilt.testing.__all__
    for name in fulltilt.testing.__all__:
        assert getattr(fulltilt.testing, name) is not None
