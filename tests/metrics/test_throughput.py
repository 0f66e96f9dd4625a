from terarec.metrics import Throughput


def test_samples_over_the_clocks_seconds():
    now = [10.0]
    metric = Throughput(clock=lambda: now[0])
    assert metric.compute() == 0.0
    metric.update(300)
    now[0] = 12.0
    metric.update(100)
    assert metric.compute() == 200.0
    metric.reset()
    now[0] = 13.0
    assert metric.compute() == 0.0
    assert metric.update(5).compute() == 5.0
