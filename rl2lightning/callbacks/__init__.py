"""Lightning callbacks: rollouts, samples, throughput, preemption."""
