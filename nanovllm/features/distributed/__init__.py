"""Several processes (ranks) compute a model together: each has a share of every layer, or some of the layers.

Rank 0 is the user's process: it schedules, samples and answers. It starts ranks 1 to n - 1, its followers, each as a
process that runs worker.py. The engine sees a runner as any other: `LeadingRunner`.

Who sends what to whom, if each rank has a share of every layer (tensor parallelism):

    rank 0                                                                  each follower r
    FollowerProcess  -- socket --> start: options, model, rank -->          worker.main
    FollowerProcess  <-- socket -- stage reached | traceback | sign of life
    GroupParallel    <-- a folder of files: the address of each rank -->    GroupParallel     once, to connect
    LeadingRunner    -- ring in shared memory --> StepPlan, every step -->  worker.follow     empty: the end
    ModelRunner      <-- all-reduce: partial sums of each layer -->         ModelRunner       NCCL or gloo
    ModelRunner      <-- gather: each rank's part of the logits --          ModelRunner
    ModelRunner      -- broadcast: the sampled token ids -->                ModelRunner

Edits of logits and log-probabilities concern rank 0 alone, because only it has all logits.

If each rank has some of the layers (pipeline parallelism: pipeline.py), the last three lines are others. For three
ranks:

    rank 0                            rank 1              rank 2
    embedding, layers 0..i-1  -- x -->  layers i..j-1  -- x -->  layers j.., final norm       x of all tokens
    LM head, sampler  <---------- rows that want logits ------------'                        if there are such rows

The order of the plans is the schedule: each rank runs all plans in the ring's order, so each link carries its tensors
in that order. Three steps keep three ranks busy, each with other sequences:

    rank 0    front 1   front 2   front 3, back 1   front 4, back 2   front 5, back 3
    rank 1              layers 1  layers 2          layers 3          layers 4
    rank 2                        layers 1          layers 2          layers 3

The back of a plan receives its rows, computes logits and samples. It comes after the front of the plan two later.
Whoever sends goes on at once, and only receivers wait. So nobody waits for a rank that waits for him, and a step of
nothing but prompt chunks sends nothing back.

Over gloo the host waits for what it receives, so a back runs when the engine asks for the result. Front 4 is planned
when the tokens of back 1 are read. Over NCCL only streams wait: each arrow is a group of two ranks with a stream of its
own (links.py). So back 1 is launched with front 3, and front 4 is planned before the host reads its
tokens: the device has them when front 4 begins. The engine keeps four steps in flight.

Between the arrows a step that only decodes is a CUDA graph: one in each stage, and one for rank 0's back
(`StageInputs` in pipeline.py).

What happens when a rank dies:

    rank 0 ends             The operating system closes its sockets. A thread of each follower sees that and ends its
                            process, whatever its other threads wait for.
    a follower ends         Its socket closes. A thread of rank 0 learns how it ended, notes that as the failure, kills
                            the other followers and aborts NCCL's collectives. So whatever rank 0 waits for fails, too:
                            a collective, because its connections close; a full ring, a load or a connection, because
                            rank 0 looks for a failure while it waits. Rank 0 raises the failure, and the engine closes.
                            While the engine closes, the same is done, but nothing is raised.
    a follower raises       It sends its traceback, which becomes the failure, and ends.
    a follower is stopped   (SIGSTOP) After max_silence seconds without a sign of life it counts as failed, and is
                            killed.
    rank 0 is stopped       The followers wait for it, as long as it takes: Ctrl-Z and fg work.
    rank 0 is killed while  That follower ends as soon as it goes on.
    a follower is stopped

No port is opened for the ranks to meet: they do so through files in a folder that only this user may enter, which is
removed at the end or when a rank has died; it stays only if rank 0 is killed before its first
follower runs. The sockets of gloo and NCCL are bound to loopback.
"""
