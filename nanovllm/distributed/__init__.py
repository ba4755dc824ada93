"""Tensor parallelism: several processes (ranks) compute each layer together, each with a share of the weights.

Rank 0 is the user's process: it schedules, samples and answers. It starts ranks 1 to n - 1, its followers, each as a
process that runs worker.py. The engine sees a runner as any other: `LeadingRunner`.

Who sends what to whom:

    rank 0                                                                  each follower r
    FollowerProcess  -- socket --> start: options, model, rank (JSON) -->   worker.main
    FollowerProcess  <-- socket -- stage reached | traceback | sign of life (a line each)
    GroupParallel    <-- a folder of files: the address of each rank -->    GroupParallel     once, to connect
    LeadingRunner    -- ring in shared memory --> StepPlan, every step -->  worker.follow     empty: the end
    ModelRunner      <-- all-reduce: partial sums of each layer -->         ModelRunner       NCCL or gloo
    ModelRunner      <-- gather: each rank's part of the logits --          ModelRunner
    ModelRunner      -- broadcast: the sampled token ids -->                ModelRunner

Edits of logits and log-probabilities concern rank 0 alone, because only it has all logits.

What happens when a rank dies:

    rank 0 ends             The operating system closes its sockets. A thread of each follower sees that and ends its
                            process, whatever its other threads wait for.
    a follower ends         Its socket closes. A thread of rank 0 learns how it ended, notes that as the failure, kills
                            the other followers and aborts NCCL's collectives. So whatever rank 0 waits for fails, too:
                            a collective, because its connections close; a full ring, a load or a connection, because
                            rank 0 looks for a failure while it waits. Rank 0 raises the failure, and the engine closes.
    a follower raises       It sends its traceback, which becomes the failure, and ends.
    a follower is stopped   (SIGSTOP) After 60 s without a sign of life it counts as failed, and is killed.
    rank 0 is stopped       The followers wait for it, as long as it takes: Ctrl-Z and fg work.
    rank 0 is killed while  That follower ends as soon as it goes on.
    a follower is stopped

No port is opened for the ranks to meet: they do so through files in a folder that only this user may enter, which is
removed at the end or when a rank has died; it stays only if rank 0 is killed before its first
follower runs. The sockets of gloo and NCCL are bound to loopback.
"""
