"""What a schedule is, as data.

The words that all rooms use:

* chunk: consecutive, or evenly strided, tokens of one document; what moves.
* shard: the chunks that a rank holds; its home is that rank.
* head group: some of the query heads, or of the KV heads, that move together.
* block: a query chunk against a KV chunk, for one query head group; what is computed.
* owner: the rank that computes a block.
* payload: a kind of tensor that travels: queries, keys and values, outputs, gradients.
* piece: one chunk of one head group of one payload.
* copy: which time a piece is sent to a rank that has freed it before.
* values, stats: the numbers of a row in the model's dtype, and the few (lse, delta) in the accumulate dtype.
* partial result: what one rank adds to the result of another; results merge by their lse, or add.
* route: the path of ranks along which a piece goes; each transfer on it is a hop.
* comm step: during which hops are in flight; compute step: in which blocks are computed beside them.
* pass: what each side carries and brings home, and what a block computes; direction: forward or backward.
* phase: a pass of a method; a method with more than one runs them one after the other.
* program: the actions of one rank: post, wait, attend, accumulate, free.
* lane: transfers of one payload over one class of links.
* domain: ranks between which links are fast; a hop is inside a domain or across domains.
* packed: the pieces of a message side by side in memory, as they travel.
* makespan: when the last rank ends; critical path: what it waited for.
* exposed communication: the part of the makespan in which nothing is computed.
"""
