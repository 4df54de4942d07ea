from fulltilt.probes.rate_limit import RateLimit
from fulltilt.testing import FakeClock


def test_a_costly_reading_is_due_again_when_its_cost_is_worked_off():
    clock = FakeClock()
    ration = RateLimit(0.01, clock=clock)
    assert ration.due()
    with ration.spend():
        clock.advance(0.05)
    clock.advance(4.9)
    assert not ration.due()
    clock.advance(0.2)
    assert ration.due()


def test_readings_in_a_row_are_all_paid_for():
    clock = FakeClock()
    ration = RateLimit(0.01, clock=clock)
    for _ in range(3):
        with ration.spend():
            clock.advance(0.01)
    clock.advance(2.9)
    assert not ration.due()
    clock.advance(0.2)
    assert ration.due()


def test_a_reading_that_failed_is_paid_for_too():
    clock = FakeClock()
    ration = RateLimit(0.01, clock=clock)
    try:
        with ration.spend():
            clock.advance(1.0)
            raise OSError
    except OSError:
        pass
    assert not ration.due()


def test_a_credit_can_be_spent_at_once_and_fills_up_again():
    clock = FakeClock()
    ration = RateLimit(0.01, credit_s=0.1, clock=clock)
    readings = 0
    while ration.due():
        readings += 1
        with ration.spend():
            clock.advance(0.04)
    assert readings == 3
    clock.advance(1000.0)
    readings = 0
    while ration.due():
        readings += 1
        with ration.spend():
            clock.advance(0.04)
    assert readings == 3, "a long rest does not save up more than the credit"
