"""Replays workloads against the real scheduler and cache, without a model.

Read ``workload`` (arrivals of requests), ``generators`` (makes workloads), ``workload_file`` (reads and
writes them), ``recording`` (records a server's requests), ``cost_model`` (the time of a forward pass),
``program_graphs`` (the hints of requests), ``depth_first`` (a policy for comparison),
``published`` (published rules for programs), ``simulation`` (the replay), ``summary`` (its figures),
``side_by_side`` (``agentflow simulate``). ``fake_runner`` replaces the model of a whole engine;
``agentflow.cluster`` simulates several engines with it, and with the faster steps of ``counting_scheduler``.
"""
