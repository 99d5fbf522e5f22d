/* NCCL without a GPU: communicators of processes (and of devices of one process) over a file in shared memory.
 *
 * It stands for libnccl.so.2 under torch's ProcessGroupNCCL, where the memory of devices is the host's. What a program
 * may not rely on is not there:
 *
 * - Operations are work of their stream (`cudaLaunchHostFunc`), and the host goes on. Those of one communicator run one
 *   after the other, in the order of the calls. What stands between ncclGroupStart and ncclGroupEnd is one operation,
 *   whose sends and receives go on together.
 * - A send ends when its receive has taken everything. EMULATED_NCCL_EAGER=bytes lets sends of up to so many bytes end
 *   before, up to what fits into the buffer of the pair; real NCCL's do so now and then.
 * - The first operation between two ranks makes the host wait for the other one, as NCCL does to connect them;
 *   EMULATED_NCCL_CONNECT=0 turns that off.
 * - A peer that is gone is not noticed, like a GPU whose peer has gone: only an abort ends what waits for it.
 *
 * What is more than NCCL does: two ranks that meet with different operations, counts or types are both named, and the
 * communicator fails, where NCCL would hang or mix up bytes. EMULATED_NCCL_DEADLINE=seconds names what every rank waits
 * for once an operation has taken so long. EMULATED_NCCL_BYTES is what a communicator takes of its device's memory,
 * and EMULATED_NCCL_TELL=1 tells of every communicator that is made.
 *
 * Sums are made in the order of the ranks, and are rounded to the type at each step, so that all ranks get the same
 * bits; NCCL adds in other orders.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nccl.h"

enum { RANKS = 64, RING = 1 << 16, SLOT = 1 << 18, SENDS = 1, RECEIVES = 2 };
typedef unsigned long long Bytes;
typedef unsigned char Byte;

enum kind { NOTHING, SEND, RECV, ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL };
static const char *const KINDS[] = {"nothing",       "Send",      "Recv",      "AllReduce", "Reduce",
                                    "ReduceScatter", "AllGather", "Broadcast", "AllToAll"};
static const char *const TYPES[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",       "uint64",
                                    "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
static const Byte SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct call { /* what is told to other ranks: the shape of an operation, and the peer or the root */
    int kind, type, operation, peer;
    Bytes count;
};

struct channel { /* from one rank to another: a stream of bytes, each message behind its call */
    atomic_ullong written, taken;
    atomic_int ends; /* SENDS, RECEIVES: who has connected */
    Byte ring[RING];
};

struct rank {
    atomic_uint phase, host_phase; /* barriers that were reached, by streams and by hosts */
    int color, key;
    struct call doing, collective;
};

struct shared {
    _Alignas(64) atomic_uint bell, sleepers; /* the bell counts changes, and is what those who wait sleep on */
    atomic_int arrived, broken;
    char complaint[512];
    struct rank ranks[RANKS];
    /* behind it: a slot for every rank, then a channel for every ordered pair */
};

struct ncclComm {
    int rank, size, device, splits, collectives;
    char name[NCCL_UNIQUE_ID_BYTES];
    struct shared *shared;
    size_t mapped;
    void *taken; /* memory of the device */
    atomic_int aborted;
    pthread_mutex_t lock; /* of the order of operations */
    pthread_cond_t next;
    Bytes queued, done;
    int running;
    double scales[64]; /* of the operators that scale before they sum */
    int scale_count;
};

struct operation {
    ncclComm_t communicator;
    struct call call;
    const Byte *from;
    Byte *to;
    double scale;
    Bytes moved; /* bytes of a message, its call first */
    cudaStream_t stream;
};

struct group { /* operations of one communicator that start together */
    ncclComm_t communicator;
    Bytes ticket;
    int count;
    struct operation operations[];
};

static _Thread_local char last_error[600];
static _Thread_local int depth;
static _Thread_local struct operation *gathered; /* since the outermost ncclGroupStart */
static _Thread_local int gathered_count;
static _Thread_local ncclComm_t arriving[RANKS];
static _Thread_local int arriving_count;

static double setting(const char *name, double usual) {
    const char *text = getenv(name);
    return text ? atof(text) : usual;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static ncclResult_t refuse(ncclResult_t error, const char *form, ...) {
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(last_error, sizeof last_error, form, arguments);
    va_end(arguments);
    return error;
}

/* ---- what is shared */

static Byte *slot(ncclComm_t c, int rank) { return (Byte *)(c->shared + 1) + (size_t)rank * SLOT; }

static struct channel *channel(ncclComm_t c, int from, int to) {
    return (struct channel *)slot(c, c->size) + (from * c->size + to);
}

static void ring(ncclComm_t c) { /* something has changed */
    atomic_fetch_add(&c->shared->bell, 1);
    if (atomic_load(&c->shared->sleepers)) syscall(SYS_futex, &c->shared->bell, FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

static void sleep_until_rung(ncclComm_t c, unsigned heard) { /* or for a tenth of a second: nobody rings for an abort */
    struct timespec tenth = {0, 100000000};
    atomic_fetch_add(&c->shared->sleepers, 1);
    syscall(SYS_futex, &c->shared->bell, FUTEX_WAIT, heard, &tenth, 0, 0);
    atomic_fetch_sub(&c->shared->sleepers, 1);
}

static int over(ncclComm_t c) { return atomic_load(&c->aborted) || atomic_load(&c->shared->broken) > 0; }

static const char *told(const struct call *call, char *text) {
    int length = sprintf(text, "%s", KINDS[call->kind]);
    if (call->kind == NOTHING) return text;
    length += sprintf(text + length, " of %llu %s", call->count, TYPES[call->type]);
    if (call->kind == SEND) length += sprintf(text + length, " to rank %d", call->peer);
    if (call->kind == RECV) length += sprintf(text + length, " from rank %d", call->peer);
    if (call->kind == REDUCE || call->kind == BROADCAST) length += sprintf(text + length, ", root %d", call->peer);
    if (call->operation >= 0) sprintf(text + length, ", operation %d", call->operation);
    return text;
}

static void complain(ncclComm_t c, const char *form, ...) { /* the communicator is of no use any more, to nobody */
    int whole = 0;
    if (!atomic_compare_exchange_strong(&c->shared->broken, &whole, -1)) { /* another rank finds its words for it */
        while (atomic_load(&c->shared->broken) < 0) sched_yield();
        return;
    }
    va_list arguments;
    va_start(arguments, form);
    vsnprintf(c->shared->complaint, sizeof c->shared->complaint, form, arguments);
    va_end(arguments);
    fprintf(stderr, "emulated NCCL: %s\n", c->shared->complaint);
    atomic_store(&c->shared->broken, 1);
    ring(c);
}

static void complain_of_waiting(ncclComm_t c) {
    char all[400] = "", one[100];
    for (int n = 0, length = 0; n < c->size && length < 300; n++)
        length += snprintf(all + length, sizeof all - (size_t)length, "; rank %d: %s", n,
                           told(&c->shared->ranks[n].doing, one));
    complain(c, "an operation has passed its deadline%s", all);
}

struct patience {
    double until;
    unsigned heard;
};
static struct patience patience(void) {
    double seconds = setting("EMULATED_NCCL_DEADLINE", 0);
    return (struct patience){seconds > 0 ? now() + seconds : 0, 0};
}
static int waits(ncclComm_t c, struct patience *left) { /* sleep once; 0 where there is nothing to wait for any more */
    if (over(c)) return 0;
    if (left->until && now() > left->until) return complain_of_waiting(c), 0;
    sleep_until_rung(c, left->heard);
    return 1;
}

/* Wait until all ranks have come here as often; `which` is one counter of theirs. */
static int all_there(ncclComm_t c, size_t which) {
    struct patience left = patience();
    atomic_uint *own = (atomic_uint *)((Byte *)&c->shared->ranks[c->rank] + which);
    unsigned goal = atomic_fetch_add(own, 1) + 1;
    ring(c);
    for (int n = 0; n < c->size; n++) {
        atomic_uint *other = (atomic_uint *)((Byte *)&c->shared->ranks[n] + which);
        for (;;) {
            left.heard = atomic_load(&c->shared->bell);
            if ((int)(atomic_load(other) - goal) >= 0) break;
            if (!waits(c, &left)) return 0;
        }
    }
    return !over(c);
}
static int barrier(ncclComm_t c) { return all_there(c, offsetof(struct rank, phase)); }
static int hosts_there(ncclComm_t c) { return all_there(c, offsetof(struct rank, host_phase)); }

/* ---- messages */

static Bytes size_of(const struct call *call) { return call->count * SIZES[call->type]; }

/* Push what fits; whether a step was made. */
static int push(struct channel *to, const Byte *bytes, Bytes *moved, Bytes end, Bytes base) {
    Bytes written = atomic_load(&to->written), room = RING - (written - atomic_load(&to->taken));
    Bytes offset = written % RING, part = end - *moved;
    if (part > room) part = room;
    if (part > RING - offset) part = RING - offset;
    if (!part) return 0;
    memcpy(to->ring + offset, bytes + (*moved - base), part);
    *moved += part;
    atomic_store(&to->written, written + part);
    return 1;
}

static int pull(struct channel *from, Byte *bytes, Bytes *moved, Bytes end, Bytes base) {
    Bytes taken = atomic_load(&from->taken), there = atomic_load(&from->written) - taken;
    Bytes offset = taken % RING, part = end - *moved;
    if (part > there) part = there;
    if (part > RING - offset) part = RING - offset;
    if (!part) return 0;
    memcpy(bytes + (*moved - base), from->ring + offset, part);
    *moved += part;
    atomic_store(&from->taken, taken + part);
    return 1;
}

enum { HEAD = sizeof(struct call) };

/* One step of a send: 1 as something moved, 0 as nothing did, 2 as it has ended. */
static int step_of_send(struct operation *o) {
    ncclComm_t c = o->communicator;
    struct channel *to = channel(c, c->rank, o->call.peer);
    Bytes end = HEAD + size_of(&o->call);
    if (o->moved < end)
        return o->moved < HEAD ? push(to, (Byte *)&o->call, &o->moved, HEAD, 0)
                               : push(to, o->from, &o->moved, end, HEAD);
    int eager = (double)size_of(&o->call) <= setting("EMULATED_NCCL_EAGER", -1);
    return eager || atomic_load(&to->taken) == atomic_load(&to->written) ? 2 : 0;
}

static int step_of_receive(struct operation *o, struct call *sent) {
    ncclComm_t c = o->communicator;
    struct channel *from = channel(c, o->call.peer, c->rank);
    Bytes end = HEAD + size_of(&o->call);
    if (o->moved < HEAD) {
        if (!pull(from, (Byte *)sent, &o->moved, HEAD, 0)) return 0;
        if (o->moved == HEAD && (sent->count != o->call.count || sent->type != o->call.type)) {
            char ours[100], theirs[100];
            complain(c, "rank %d does a %s, which meets rank %d with a %s", c->rank, told(&o->call, ours),
                     o->call.peer, told(sent, theirs));
        }
        return 1;
    }
    if (o->moved < end) return pull(from, o->to, &o->moved, end, HEAD);
    return 2;
}

/* Sends and receives of one group, all together; those of a pair in their order. */
static void exchange(struct operation *messages, int count) {
    ncclComm_t c = messages->communicator;
    struct patience left = patience();
    struct call *sent = calloc((size_t)count, sizeof *sent);
    char *ended = calloc((size_t)count, 1);
    for (int open = count; open;) {
        char busy[2][RANKS] = {{0}};
        int moved = 0;
        left.heard = atomic_load(&c->shared->bell);
        for (int n = 0; n < count; n++) {
            struct operation *o = &messages[n];
            int receives = o->call.kind == RECV;
            if (ended[n] || busy[receives][o->call.peer]) continue;
            busy[receives][o->call.peer] = 1;
            if (!moved) c->shared->ranks[c->rank].doing = o->call;
            int step = receives ? step_of_receive(o, &sent[n]) : step_of_send(o);
            if (step == 2) ended[n] = 1, open--;
            moved |= step;
        }
        if (over(c)) break;
        if (moved)
            ring(c);
        else if (!waits(c, &left))
            break;
    }
    free(ended), free(sent);
}

/* ---- arithmetic */

static float of_bfloat(unsigned short bits) {
    union {
        unsigned bits;
        float value;
    } both = {(unsigned)bits << 16};
    return both.value;
}
static unsigned short to_bfloat(float value) { /* to nearest, ties to even */
    union {
        float value;
        unsigned bits;
    } both = {value};
    if (value != value) return 0x7fc0;
    return (unsigned short)((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}

#define SAME(x) (x)
#define COMBINE(TYPE, READ, WRITE, WIDE)                                                          \
    static void combine_##TYPE(int operation, void *sum, const void *added, Bytes count) {        \
        TYPE *left = sum;                                                                         \
        const TYPE *right = added;                                                                \
        for (Bytes n = 0; n < count; n++) {                                                       \
            WIDE a = READ(left[n]), b = READ(right[n]);                                           \
            left[n] = WRITE(operation == ncclProd  ? a * b                                        \
                            : operation == ncclMax ? (a > b || a != a ? a : b)                    \
                            : operation == ncclMin ? (a < b || a != a ? a : b)                    \
                                                   : a + b);                                      \
        }                                                                                         \
    }                                                                                             \
    static void scale_##TYPE(double by, void *values, Bytes count) {                              \
        TYPE *all = values;                                                                       \
        for (Bytes n = 0; n < count; n++) all[n] = WRITE((WIDE)(READ(all[n]) * (WIDE)by));        \
    }                                                                                             \
    static void divide_##TYPE(int by, void *values, Bytes count) {                                \
        TYPE *all = values;                                                                       \
        for (Bytes n = 0; n < count; n++) all[n] = WRITE((WIDE)(READ(all[n]) / (WIDE)by));        \
    }

typedef signed char int8;
typedef unsigned char uint8;
typedef int int32;
typedef unsigned uint32;
typedef long long int64;
typedef unsigned long long uint64;
typedef _Float16 float16;
typedef unsigned short bfloat16;
COMBINE(int8, SAME, SAME, int8)
COMBINE(uint8, SAME, SAME, uint8)
COMBINE(int32, SAME, SAME, int32)
COMBINE(uint32, SAME, SAME, uint32)
COMBINE(int64, SAME, SAME, int64)
COMBINE(uint64, SAME, SAME, uint64)
COMBINE(float16, (float), (_Float16), float)
COMBINE(float, SAME, SAME, float)
COMBINE(double, SAME, SAME, double)
COMBINE(bfloat16, of_bfloat, to_bfloat, float)

#define OF(what)                                                                                    \
    {what##_int8,   what##_uint8,   what##_int32, what##_uint32, what##_int64,                      \
     what##_uint64, what##_float16, what##_float, what##_double, what##_bfloat16}
static void (*const combine[])(int, void *, const void *, Bytes) = OF(combine);
static void (*const scale[])(double, void *, Bytes) = OF(scale);
static void (*const divide[])(int, void *, Bytes) = OF(divide);
static int floats(int type) { return type >= ncclFloat16 && type <= ncclBfloat16; }

/* ---- collectives */

/* NCCL multiplies floats before it sums them, and divides integers after. */
static int scales(const struct operation *o) {
    return o->call.operation >= ncclNumOps || (o->call.operation == ncclAvg && floats(o->call.type));
}

/* One piece of the sum over ranks, from their slots, `offset` bytes into each. */
static void reduced(struct operation *o, Byte *to, Bytes offset, Bytes count) {
    ncclComm_t c = o->communicator;
    int type = o->call.type, operation = o->call.operation;
    memcpy(to, slot(c, 0) + offset, count * SIZES[type]);
    for (int n = 1; n < c->size; n++) combine[type](operation, to, slot(c, n) + offset, count);
    if (operation == ncclAvg && !scales(o)) divide[type](c->size, to, count);
}

static void contribute(struct operation *o, Bytes at, const Byte *from, Bytes count) {
    ncclComm_t c = o->communicator;
    memcpy(slot(c, c->rank) + at, from, count * SIZES[o->call.type]);
    if (o->call.operation >= 0 && scales(o)) scale[o->call.type](o->scale, slot(c, c->rank) + at, count);
}

static int agreed(struct operation *o) {
    ncclComm_t c = o->communicator;
    c->shared->ranks[c->rank].collective = o->call;
    if (!barrier(c)) return 0;
    for (int n = 0; n < c->size; n++) {
        struct call other = c->shared->ranks[n].collective, own = o->call;
        if (other.operation >= ncclNumOps && own.operation >= ncclNumOps) other.operation = own.operation;
        char ours[100], theirs[100];
        if (memcmp(&other, &own, sizeof own))
            complain(c, "rank %d does %s, which meets rank %d with %s", c->rank, told(&own, ours), n,
                     told(&other, theirs));
    }
    return barrier(c);
}

/* All pieces of a slot's size: each rank lays its part into its slot, all meet, each takes what it wants, all meet. */
static void collective(struct operation *o) {
    ncclComm_t c = o->communicator;
    int kind = o->call.kind, size = SIZES[o->call.type], root = o->call.peer;
    int wide = kind == REDUCE_SCATTER || kind == ALL_TO_ALL;
    Bytes count = o->call.count, most = SLOT / (Bytes)size / (wide ? (Bytes)c->size : 1);
    c->shared->ranks[c->rank].doing = o->call;
    if (!agreed(o)) return;
    for (Bytes at = 0; at < count; at += most) {
        Bytes part = count - at < most ? count - at : most, bytes = part * (Bytes)size;
        if (wide)
            for (int n = 0; n < c->size; n++)
                contribute(o, (Bytes)n * bytes, o->from + ((Bytes)n * count + at) * (Bytes)size, part);
        else if (kind != BROADCAST || c->rank == root)
            contribute(o, 0, o->from + at * (Bytes)size, part);
        if (!barrier(c)) return;
        if (kind == ALL_REDUCE || (kind == REDUCE && c->rank == root)) reduced(o, o->to + at * (Bytes)size, 0, part);
        if (kind == REDUCE_SCATTER) reduced(o, o->to + at * (Bytes)size, (Bytes)c->rank * bytes, part);
        if (kind == BROADCAST) memmove(o->to + at * (Bytes)size, slot(c, root), bytes);
        if (kind == ALL_GATHER || kind == ALL_TO_ALL)
            for (int n = 0; n < c->size; n++)
                memcpy(o->to + ((Bytes)n * count + at) * (Bytes)size,
                       slot(c, n) + (kind == ALL_TO_ALL ? (Bytes)c->rank * bytes : 0), bytes);
        if (!barrier(c)) return;
    }
}

/* ---- groups */

static void run(void *argument) { /* in the thread of a stream */
    struct group *group = argument;
    ncclComm_t c = group->communicator;
    pthread_mutex_lock(&c->lock);
    while (c->done != group->ticket) pthread_cond_wait(&c->next, &c->lock);
    c->running = 1;
    pthread_mutex_unlock(&c->lock);
    for (int n = 0; n < group->count && !over(c);) { /* collectives one by one, messages between them together */
        int together = 0;
        while (n + together < group->count && group->operations[n + together].call.kind <= RECV) together++;
        if (together)
            exchange(&group->operations[n], together);
        else
            collective(&group->operations[n]);
        n += together ? together : 1;
    }
    if (!over(c)) c->shared->ranks[c->rank].doing.kind = NOTHING;
    pthread_mutex_lock(&c->lock);
    c->done++, c->running = 0;
    pthread_cond_broadcast(&c->next);
    pthread_mutex_unlock(&c->lock);
    free(group);
}

/* Connections are made in two rounds, first said and then waited for, so that devices of one process may connect. */
static void say_connected(const struct operation *o) {
    ncclComm_t c = o->communicator;
    if (o->call.kind == SEND) atomic_fetch_or(&channel(c, c->rank, o->call.peer)->ends, SENDS);
    if (o->call.kind == RECV) atomic_fetch_or(&channel(c, o->call.peer, c->rank)->ends, RECEIVES);
    if (o->call.kind > RECV) atomic_store(&channel(c, c->rank, c->rank)->ends, SENDS | RECEIVES | 4);
    ring(c);
}
static void wait_connected(const struct operation *o) {
    ncclComm_t c = o->communicator;
    struct patience left = patience();
    int first = o->call.kind > RECV ? 0 : o->call.peer, last = o->call.kind > RECV ? c->size - 1 : o->call.peer;
    int wanted = o->call.kind > RECV ? 4 : SENDS | RECEIVES;
    for (int n = first; n <= last; n++)
        for (;;) {
            struct channel *other = o->call.kind == SEND   ? channel(c, c->rank, n)
                                    : o->call.kind == RECV ? channel(c, n, c->rank)
                                                           : channel(c, n, n);
            left.heard = atomic_load(&c->shared->bell);
            if ((atomic_load(&other->ends) & wanted) == wanted) break;
            if (!waits(c, &left)) return;
        }
}

static ncclResult_t launch(void) { /* what was gathered, a group for each communicator */
    int count = gathered_count;
    struct operation *all = gathered;
    gathered = 0, gathered_count = 0;
    if (setting("EMULATED_NCCL_CONNECT", 1) != 0) {
        for (int n = 0; n < count; n++) say_connected(&all[n]);
        for (int n = 0; n < count; n++) wait_connected(&all[n]);
    }
    ncclResult_t result = ncclSuccess;
    for (int n = 0; n < count; n++) {
        ncclComm_t c = all[n].communicator;
        if (!c) continue;
        struct group *group = malloc(sizeof *group + sizeof *all * (size_t)(count - n));
        *group = (struct group){.communicator = c};
        for (int m = n; m < count; m++) {
            if (all[m].communicator != c) continue;
            if (all[m].stream != all[n].stream)
                result = refuse(ncclInvalidUsage, "one communicator on two streams in a group is not emulated");
            group->operations[group->count++] = all[m];
            all[m].communicator = 0;
        }
        pthread_mutex_lock(&c->lock);
        group->ticket = c->queued++;
        pthread_mutex_unlock(&c->lock);
        int before = 0;
        cudaGetDevice(&before), cudaSetDevice(c->device);
        if (cudaLaunchHostFunc(group->operations[0].stream, run, group)) result = ncclUnhandledCudaError;
        cudaSetDevice(before);
    }
    free(all);
    return result;
}

static ncclResult_t arrived(ncclComm_t c) { /* wait until every rank has the communicator */
    struct patience left = patience();
    for (;;) {
        left.heard = atomic_load(&c->shared->bell);
        if (atomic_load(&c->shared->arrived) >= c->size) break;
        if (!waits(c, &left)) return refuse(ncclSystemError, "not all ranks have come to make a communicator");
    }
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    if (depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--depth) return ncclSuccess;
    ncclResult_t result = ncclSuccess;
    for (int n = 0; n < arriving_count; n++) {
        ncclResult_t one = arrived(arriving[n]);
        result = one ? one : result;
    }
    arriving_count = 0;
    ncclResult_t launched = launch();
    return result ? result : launched;
}

/* ---- communicators */

ncclResult_t ncclGetVersion(int *found) { return *found = NCCL_VERSION_CODE, ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *found) {
    Bytes random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) return ncclSystemError;
    memset(found, 0, sizeof *found);
    snprintf(found->internal, sizeof found->internal, "/emulated-nccl-%d-%016llx", getpid(), random);
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t *found, int size, const char *name, int rank) {
    if (size > RANKS || rank < 0 || rank >= size)
        return refuse(ncclInvalidArgument, "rank %d of %d: up to %d ranks are emulated", rank, size, RANKS);
    ncclComm_t c = calloc(1, sizeof *c);
    c->rank = rank, c->size = size;
    snprintf(c->name, sizeof c->name, "%s", name);
    cudaGetDevice(&c->device);
    size_t taken = (size_t)setting("EMULATED_NCCL_BYTES", 0);
    if (taken && cudaMalloc(&c->taken, taken)) {
        free(c);
        return refuse(ncclUnhandledCudaError, "Cuda failure 2 'out of memory'");
    }
    c->mapped = sizeof *c->shared + (size_t)size * SLOT + (size_t)size * (size_t)size * sizeof(struct channel);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, (off_t)c->mapped))
        return refuse(ncclSystemError, "no shared memory for a communicator: %s", strerror(errno));
    c->shared = mmap(0, c->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->shared == MAP_FAILED) return refuse(ncclSystemError, "mmap: %s", strerror(errno));
    pthread_mutex_init(&c->lock, 0), pthread_cond_init(&c->next, 0);
    if (atomic_fetch_add(&c->shared->arrived, 1) == size - 1) shm_unlink(name); /* all have it open */
    ring(c);
    *found = c;
    if (setting("EMULATED_NCCL_TELL", 0) != 0)
        fprintf(stderr, "emulated NCCL: process %d makes %s, rank %d of %d\n", getpid(), name, rank, size);
    if (depth && arriving_count < RANKS) return arriving[arriving_count++] = c, ncclSuccess;
    return arrived(c);
}

ncclResult_t ncclCommInitRank(ncclComm_t *found, int size, ncclUniqueId id, int rank) {
    return join(found, size, id.internal, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *found, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return join(found, size, id.internal, rank);
}
ncclResult_t ncclCommInitRankScalable(
    ncclComm_t *found, int size, int rank, int count, ncclUniqueId *ids, ncclConfig_t *config) {
    return join(found, size, ids[0].internal, rank);
}
ncclResult_t ncclCommInitAll(ncclComm_t *found, int size, const int *devices) {
    ncclUniqueId id;
    int before = 0;
    ncclResult_t result = ncclGetUniqueId(&id);
    cudaGetDevice(&before);
    ncclGroupStart();
    for (int n = 0; n < size && !result; n++) {
        cudaSetDevice(devices ? devices[n] : n);
        result = ncclCommInitRank(&found[n], size, id, n);
    }
    cudaSetDevice(before);
    ncclResult_t ended = ncclGroupEnd();
    return result ? result : ended;
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *found, ncclConfig_t *config) {
    struct rank *own = &c->shared->ranks[c->rank];
    char name[NCCL_UNIQUE_ID_BYTES + 32];
    int size = 0, rank = 0;
    own->color = color, own->key = key;
    if (!hosts_there(c)) return refuse(ncclRemoteError, "not all ranks have come to split a communicator");
    for (int n = 0; n < c->size; n++) {
        struct rank *other = &c->shared->ranks[n];
        if (other->color != color) continue;
        size++;
        rank += other->key < key || (other->key == key && n < c->rank);
    }
    snprintf(name, sizeof name, "%.80s.%d.%d", c->name, ++c->splits, color);
    if (!hosts_there(c)) return ncclRemoteError;
    *found = 0;
    return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : join(found, size, name, rank);
}

ncclResult_t ncclCommFinalize(ncclComm_t c) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) { /* as what is queued has come to its end */
    if (!c) return ncclSuccess;
    pthread_mutex_lock(&c->lock);
    while (c->done != c->queued) pthread_cond_wait(&c->next, &c->lock);
    pthread_mutex_unlock(&c->lock);
    if (c->taken) cudaFree(c->taken);
    munmap(c->shared, c->mapped);
    free(c);
    return ncclSuccess;
}
/* Ends what this rank does, and its peers learn nothing of it. What is queued still ends, so that `c` has to stay. */
ncclResult_t ncclCommAbort(ncclComm_t c) {
    if (!c) return ncclSuccess;
    atomic_store(&c->aborted, 1);
    ring(c);
    if (atomic_load(&c->shared->arrived) < c->size) shm_unlink(c->name);
    pthread_mutex_lock(&c->lock);
    while (c->running) pthread_cond_wait(&c->next, &c->lock);
    pthread_mutex_unlock(&c->lock);
    if (c->taken) cudaFree(c->taken), c->taken = 0;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *found) {
    *found = atomic_load(&c->shared->broken) > 0 ? ncclInvalidUsage : ncclSuccess;
    return ncclSuccess;
}
const char *ncclGetLastError(ncclComm_t c) {
    return c && atomic_load(&c->shared->broken) > 0 ? c->shared->complaint : last_error;
}
const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",      "unhandled cuda error", "unhandled system error",
                                        "internal error", "invalid argument",    "invalid usage",
                                        "remote process exited or there was a network error", "in progress"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *found) { return *found = c->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *found) { return *found = c->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *found) { return *found = c->device, ncclSuccess; }

/* ---- operations */

static ncclResult_t add(ncclComm_t c, int kind, const void *from, void *to, size_t count, int type, int operation,
                        int peer, cudaStream_t stream) {
    if (!c || peer < -1 || peer >= c->size) return refuse(ncclInvalidArgument, "%s: no such rank", KINDS[kind]);
    if (type < 0 || type >= ncclNumTypes || (operation >= 0 && type > ncclBfloat16))
        return refuse(ncclInvalidArgument, "%s: type %d is not emulated", KINDS[kind], type);
    if (atomic_load(&c->shared->broken) > 0) return refuse(ncclInvalidUsage, "%s", c->shared->complaint);
    if (!count && kind > RECV) return ncclSuccess; /* as NCCL does */
    struct operation made = {.communicator = c, .from = from, .to = to, .stream = stream};
    made.call = (struct call){kind, type, operation, peer, count};
    made.scale = operation >= ncclNumOps ? c->scales[operation - ncclNumOps] : 1.0 / c->size;
    gathered = realloc(gathered, sizeof made * (size_t)(gathered_count + 1));
    gathered[gathered_count++] = made;
    return depth ? ncclSuccess : launch();
}

ncclResult_t ncclSend(const void *from, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
    return add(c, SEND, from, 0, n, type, -1, peer, s);
}
ncclResult_t ncclRecv(void *to, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
    return add(c, RECV, 0, to, n, type, -1, peer, s);
}
ncclResult_t ncclAllReduce(
    const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return add(c, ALL_REDUCE, from, to, n, type, op, -1, s);
}
ncclResult_t ncclReduce(
    const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
    return add(c, REDUCE, from, to, n, type, op, root, s);
}
ncclResult_t ncclReduceScatter(
    const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return add(c, REDUCE_SCATTER, from, to, n, type, op, -1, s);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t c, cudaStream_t s) {
    return add(c, ALL_GATHER, from, to, n, type, -1, -1, s);
}
ncclResult_t ncclBroadcast(
    const void *from, void *to, size_t n, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t s) {
    return add(c, BROADCAST, from, to, n, type, -1, root, s);
}
ncclResult_t ncclBcast(void *both, size_t n, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t s) {
    return ncclBroadcast(both, both, n, type, root, c, s);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t c, cudaStream_t s) {
    return add(c, ALL_TO_ALL, from, to, n, type, -1, -1, s);
}

ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t *found, void *scalar, ncclDataType_t type, ncclScalarResidence_t where, ncclComm_t c) {
    if (!floats(type)) return refuse(ncclInvalidArgument, "only floats are scaled here");
    int number = c->scale_count++ % 64;
    c->scales[number] = type == ncclFloat64   ? *(double *)scalar
                        : type == ncclFloat32 ? *(float *)scalar
                        : type == ncclFloat16 ? (double)*(_Float16 *)scalar
                                              : of_bfloat(*(unsigned short *)scalar);
    return *found = (ncclRedOp_t)(ncclNumOps + number), ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t operation, ncclComm_t c) { return ncclSuccess; }

/* ---- memory, and what is not emulated */

ncclResult_t ncclMemAlloc(void **found, size_t size) { return cudaMalloc(found, size) ? ncclUnhandledCudaError : 0; }
ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : 0; }
ncclResult_t ncclCommRegister(const ncclComm_t c, void *buffer, size_t size, void **found) {
    return *found = buffer, ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle) { return ncclSuccess; }

/* Under the names of functions whose arguments nobody looks at. */
#define ABSENT(name)                                                                                          \
    ncclResult_t absent_##name(void) __asm__(#name);                                                          \
    ncclResult_t absent_##name(void) { return refuse(ncclInvalidUsage, "%s is not emulated", #name); }
ABSENT(ncclCommShrink)
ABSENT(ncclCommSuspend)
ABSENT(ncclCommResume)
ABSENT(ncclCommMemStats)
ABSENT(ncclCommWindowRegister)
ABSENT(ncclCommWindowDeregister)
ABSENT(ncclDevCommCreate)
ABSENT(ncclDevCommDestroy)
ABSENT(ncclGetLsaMultimemDevicePointer)
ABSENT(ncclGetPeerDevicePointer)
ABSENT(ncclPutSignal)
ABSENT(ncclSignal)
ABSENT(ncclWaitSignal)
ABSENT(ncclGroupSimulateEnd)
