"""How the teacher's values become gradient.

    settings.py         which loss with which numbers, for one step; what travels from the trainer to the worker
    schedule.py         the coefficient over the steps
    weights.py          how much each token's teacher term counts
    clamp.py            a limit for what one sampled token can do
    policy_gradient.py  the reverse KL as an advantage of each token
    distribution.py     divergences on the teacher's top-k, chunk by chunk
    in_verl.py          puts the above into verl's loss
    student_topk.py     the student's own top-k, out of a forward of verl's actor

The first three import no torch: the trainer's side reads them. The last two alone import verl.
"""
