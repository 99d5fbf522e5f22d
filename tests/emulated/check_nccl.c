/* Checks the emulated NCCL by itself: collectives beside plain loops, orders that end, and orders that have to hang.
 *
 * Every case runs in processes of its own, one a rank, and says what has to come of it within a deadline. A rank ends
 * with 0 as it has seen what it should; one that does not end has hung.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl.h"

/* The rest of a CUDA: streams.c has the streams. */
static _Thread_local int device;
cudaError_t cudaGetDevice(int *found) { return *found = device, cudaSuccess; }
cudaError_t cudaSetDevice(int number) { return device = number, cudaSuccess; }
cudaError_t cudaMalloc(void **found, size_t size) { return cudaErrorMemoryAllocation; }
cudaError_t cudaFree(void *pointer) { return cudaSuccess; }

enum { MOST = 300000 };
static ncclUniqueId id, other_id;
static ncclComm_t c, d;
static cudaStream_t s, t;
static int size;
static float one[4 * MOST], two[4 * MOST];

#define MUST(condition)                                                                                       \
    do {                                                                                                      \
        if (!(condition)) fprintf(stderr, "rank %d, line %d: %s\n", rank, __LINE__, #condition), exit(1);     \
    } while (0)
#define DONE(call) MUST((call) == ncclSuccess)
#define JOIN(stream) cudaStreamSynchronize(stream)

static void open_up(int rank) {
    cudaStreamCreate(&s), cudaStreamCreate(&t);
    DONE(ncclCommInitRank(&c, size, id, rank));
}
static float value(int rank, int n) { return (float)((rank + 1) * (n % 97 + 1) % 31); }
static void fill(int rank, int count) {
    for (int n = 0; n < count; n++) one[n] = value(rank, n);
}

/* ---- collectives beside loops */

static void sums(int rank) {
    for (int count = 1; count <= MOST; count = count * 7 + 1) {
        fill(rank, count);
        DONE(ncclAllReduce(one, two, count, ncclFloat32, ncclSum, c, s));
        JOIN(s);
        for (int n = 0; n < count; n++) {
            float sum = 0, most = 0;
            for (int r = 0; r < size; r++) sum += value(r, n), most = value(r, n) > most ? value(r, n) : most;
            MUST(two[n] == sum);
            one[n] = most;
        }
        float *expected = malloc(sizeof *expected * count);
        memcpy(expected, one, sizeof *expected * count);
        fill(rank, count);
        DONE(ncclAllReduce(one, one, count, ncclFloat32, ncclMax, c, s)); /* in place */
        JOIN(s);
        MUST(!memcmp(one, expected, sizeof *expected * count));
        free(expected);
    }
}

static void averages(int rank) {
    ncclRedOp_t tripled;
    float three = 3;
    fill(rank, 100);
    DONE(ncclAllReduce(one, two, 100, ncclFloat32, ncclAvg, c, s));
    DONE(ncclRedOpCreatePreMulSum(&tripled, &three, ncclFloat32, ncclScalarHostImmediate, c));
    DONE(ncclAllReduce(one, two + 100, 100, ncclFloat32, tripled, c, s));
    DONE(ncclRedOpDestroy(tripled, c));
    JOIN(s);
    for (int n = 0; n < 100; n++) {
        float sum = 0;
        for (int r = 0; r < size; r++) sum += value(r, n);
        MUST(two[n] - sum / size < 1e-5 && sum / size - two[n] < 1e-5 && two[100 + n] == 3 * sum);
    }
    long long wholes[2] = {rank, -7}, found[2];
    DONE(ncclAllReduce(wholes, found, 2, ncclInt64, ncclAvg, c, s));
    JOIN(s);
    MUST(found[0] == size * (size - 1) / 2 / size && found[1] == -7);
}

static void halves(int rank) { /* 1 + 2**-7 + 2**-8 is no bfloat16, and lies between two: the even one is taken */
    unsigned short bfloats[2] = {rank ? 0x3b80 : 0x3f81, 0x4000}, sum[2];
    _Float16 half = rank ? 0.00390625 : 1, found;
    DONE(ncclAllReduce(bfloats, sum, 2, ncclBfloat16, ncclSum, c, s));
    DONE(ncclAllReduce(&half, &found, 1, ncclFloat16, ncclSum, c, s));
    JOIN(s);
    MUST(sum[0] == 0x3f82 || size > 2);
    MUST(sum[1] == (size == 2 ? 0x4080 : size == 3 ? 0x40c0 : 0x4100));
    MUST((float)found == 1 + (size - 1) / 256.0f);
    signed char bytes[3] = {rank, -rank, 2}, least[3];
    DONE(ncclAllReduce(bytes, least, 3, ncclInt8, ncclMin, c, s));
    JOIN(s);
    MUST(least[0] == 0 && least[1] == 1 - size && least[2] == 2);
    double powers[1] = {2}, product[1];
    DONE(ncclAllReduce(powers, product, 1, ncclFloat64, ncclProd, c, s));
    JOIN(s);
    MUST(product[0] == 1 << size);
}

static void scattered(int rank) {
    int count = MOST - 1;
    for (int r = 0; r < size; r++)
        for (int n = 0; n < count; n++) one[r * count + n] = value(rank, n + 5 * r);
    DONE(ncclReduceScatter(one, two, count, ncclFloat32, ncclSum, c, s));
    JOIN(s);
    for (int n = 0; n < count; n++) {
        float sum = 0;
        for (int r = 0; r < size; r++) sum += value(r, n + 5 * rank);
        MUST(two[n] == sum);
    }
    memcpy(one + rank * count, two, sizeof *two * count);
    DONE(ncclAllGather(one + rank * count, one, count, ncclFloat32, c, s)); /* in place */
    JOIN(s);
    for (int r = 0; r < size; r++)
        for (int n = 0; n < count; n++) {
            float sum = 0;
            for (int q = 0; q < size; q++) sum += value(q, n + 5 * r);
            MUST(one[r * count + n] == sum);
        }
    for (int r = 0; r < size; r++)
        for (int n = 0; n < count; n++) one[r * count + n] = value(rank, n + 5 * r);
    DONE(ncclAlltoAll(one, two, count, ncclFloat32, c, s));
    JOIN(s);
    for (int r = 0; r < size; r++)
        for (int n = 0; n < count; n++) MUST(two[r * count + n] == value(r, n + 5 * rank));
}

static void rooted(int rank) {
    for (int root = 0; root < size; root++) {
        fill(rank, MOST);
        DONE(ncclReduce(one, rank == root ? two : 0, MOST, ncclFloat32, ncclSum, root, c, s));
        DONE(ncclBroadcast(rank == root ? two : 0, one, MOST, ncclFloat32, root, c, s));
        JOIN(s);
        for (int n = 0; n < MOST; n++) {
            float sum = 0;
            for (int r = 0; r < size; r++) sum += value(r, n);
            MUST(one[n] == sum);
        }
    }
}

/* ---- messages */

static void around(int rank) { /* everyone sends to the next one, in one group, twice, and to itself */
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    fill(rank, MOST);
    DONE(ncclGroupStart());
    DONE(ncclSend(one, MOST, ncclFloat32, next, c, s));
    DONE(ncclSend(one + 1, 10, ncclFloat32, next, c, s));
    DONE(ncclSend(one, 3, ncclFloat32, rank, c, s));
    DONE(ncclRecv(two + 2 * MOST, 3, ncclFloat32, rank, c, s));
    DONE(ncclRecv(two, MOST, ncclFloat32, before, c, s));
    DONE(ncclRecv(two + MOST, 10, ncclFloat32, before, c, s));
    DONE(ncclGroupEnd());
    JOIN(s);
    for (int n = 0; n < MOST; n++) MUST(two[n] == value(before, n));
    for (int n = 0; n < 10; n++) MUST(two[MOST + n] == value(before, n + 1));
    for (int n = 0; n < 3; n++) MUST(two[2 * MOST + n] == value(rank, n));
}

static void in_order(int rank) { /* empty and full ones, one after the other */
    for (int n = 0; n < 200; n++) {
        float there = (float)n, back = -1;
        if (rank == 0) DONE(ncclSend(&there, n % 3 != 0, ncclFloat32, 1, c, s));
        if (rank == 1) DONE(ncclRecv(&back, n % 3 != 0, ncclFloat32, 0, c, s));
        JOIN(s);
        MUST(rank != 1 || back == (n % 3 ? (float)n : -1));
    }
}

static void host_goes_on(int rank) { /* what nobody has received does not keep the host */
    fill(rank, 10);
    if (rank == 0) {
        DONE(ncclSend(one, 10, ncclFloat32, 1, c, s));
        MUST(cudaStreamQuery(s) == cudaErrorNotReady);
    } else if (rank == 1) {
        usleep(200000);
        DONE(ncclRecv(two, 10, ncclFloat32, 0, c, s));
    }
    JOIN(s);
    MUST(rank != 1 || two[9] == value(0, 9));
}

static void both_send_first(int rank) {
    if (rank > 1) return;
    DONE(ncclSend(one, 10, ncclFloat32, 1 - rank, c, s));
    DONE(ncclRecv(two, 10, ncclFloat32, 1 - rank, c, s));
    JOIN(s);
}
static void both_send_first_big(int rank) {
    if (rank > 1) return;
    DONE(ncclSend(one, MOST, ncclFloat32, 1 - rank, c, s));
    DONE(ncclRecv(two, MOST, ncclFloat32, 1 - rank, c, s));
    JOIN(s);
}
static void on_two_streams(int rank) { /* of one communicator: still in the order of the calls */
    if (rank > 1) return;
    DONE(ncclSend(one, 10, ncclFloat32, 1 - rank, c, s));
    DONE(ncclRecv(two, 10, ncclFloat32, 1 - rank, c, t));
    JOIN(s), JOIN(t);
}
static void on_two_communicators(int rank) {
    DONE(ncclCommInitRank(&d, size, other_id, rank));
    if (rank > 1) return;
    DONE(ncclSend(one, 10, ncclFloat32, 1 - rank, rank ? c : d, s));
    DONE(ncclRecv(two, 10, ncclFloat32, 1 - rank, rank ? d : c, t));
    JOIN(s), JOIN(t);
}
static void two_communicators_crossed(int rank) { /* on one stream, in two orders */
    DONE(ncclCommInitRank(&d, size, other_id, rank));
    DONE(ncclAllReduce(one, two, 10, ncclFloat32, ncclSum, rank ? c : d, s));
    DONE(ncclAllReduce(one, two, 10, ncclFloat32, ncclSum, rank ? d : c, s));
    JOIN(s);
}
static void two_communicators_on_streams(int rank) { /* each on its own stream: in whatever order */
    DONE(ncclCommInitRank(&d, size, other_id, rank));
    DONE(ncclAllReduce(one, two, 10, ncclFloat32, ncclSum, rank ? c : d, rank ? s : t));
    DONE(ncclAllReduce(one, two, 10, ncclFloat32, ncclSum, rank ? d : c, rank ? t : s));
    JOIN(s), JOIN(t);
}
static void connecting(int rank) { /* the host waits at the first message between two ranks, not at the second */
    struct timespec start, end;
    for (int round = 0; round < 2; round++) {
        if (rank == 1) usleep(900000);
        clock_gettime(CLOCK_MONOTONIC, &start);
        if (rank == 0) DONE(ncclSend(one, 1, ncclFloat32, 1, c, s));
        if (rank == 1) DONE(ncclRecv(two, 1, ncclFloat32, 0, c, s));
        clock_gettime(CLOCK_MONOTONIC, &end);
        double seconds = end.tv_sec - start.tv_sec + 1e-9 * (end.tv_nsec - start.tv_nsec);
        MUST(rank || (round ? seconds < 0.5 : seconds > 0.7));
        JOIN(s);
    }
}

/* ---- communicators */

static void split(int rank) {
    ncclComm_t part;
    float number = (float)(1 << rank), sum = 0;
    DONE(ncclCommSplit(c, rank % 2, -rank, &part, 0)); /* in the other order */
    int place, places;
    DONE(ncclCommUserRank(part, &place));
    DONE(ncclCommCount(part, &places));
    MUST(places == (size + 1 - rank % 2) / 2 && place == places - 1 - rank / 2);
    DONE(ncclAllReduce(&number, &sum, 1, ncclFloat32, ncclSum, part, s));
    JOIN(s);
    float expected = 0;
    for (int r = rank % 2; r < size; r += 2) expected += (float)(1 << r);
    MUST(sum == expected);
    DONE(ncclCommDestroy(part));
    DONE(ncclCommSplit(c, rank ? NCCL_SPLIT_NOCOLOR : 0, 0, &part, 0));
    MUST(rank ? !part : !!part);
}

static void devices(int rank) { /* all of one process */
    ncclComm_t all[4];
    cudaStream_t streams[4];
    float sum[4] = {0}, got[4] = {0};
    if (rank) return;
    DONE(ncclCommInitAll(all, 4, 0));
    for (int n = 0; n < 4; n++) cudaSetDevice(n), cudaStreamCreate(&streams[n]), one[n] = (float)n;
    DONE(ncclGroupStart());
    for (int n = 0; n < 4; n++) DONE(ncclAllReduce(one + n, sum + n, 1, ncclFloat32, ncclSum, all[n], streams[n]));
    DONE(ncclGroupEnd());
    DONE(ncclGroupStart());
    for (int n = 0; n < 4; n++) {
        DONE(ncclSend(one + n, 1, ncclFloat32, (n + 1) % 4, all[n], streams[n]));
        DONE(ncclRecv(got + n, 1, ncclFloat32, (n + 3) % 4, all[n], streams[n]));
    }
    DONE(ncclGroupEnd());
    for (int n = 0; n < 4; n++) JOIN(streams[n]);
    for (int n = 0; n < 4; n++) MUST(sum[n] == 6 && got[n] == (n + 3) % 4);
}

static void aborting(int rank) { /* frees one's own stream, and the process that aborts alone */
    DONE(ncclAllReduce(one, two, 1, ncclFloat32, ncclSum, c, s));
    JOIN(s);
    if (rank == 1) return;
    DONE(ncclAllReduce(one, two, 1, ncclFloat32, ncclSum, c, s));
    usleep(100000);
    MUST(cudaStreamQuery(s) == cudaErrorNotReady);
    DONE(ncclCommAbort(c));
    JOIN(s);
}
static void deserted(int rank) { /* nobody tells a rank that its peer has gone */
    DONE(ncclAllReduce(one, two, 1, ncclFloat32, ncclSum, c, s));
    JOIN(s);
    if (rank == 1) kill(getpid(), SIGKILL);
    DONE(ncclAllReduce(one, two, 1, ncclFloat32, ncclSum, c, s));
    JOIN(s);
}

/* ---- disagreement: all who take part learn of it */

static void told_apart(int rank) {
    ncclResult_t error;
    JOIN(s);
    DONE(ncclCommGetAsyncError(c, &error));
    MUST(error == ncclInvalidUsage && strstr(ncclGetLastError(c), "rank 1"));
    MUST(ncclAllReduce(one, two, 1, ncclFloat32, ncclSum, c, s) == ncclInvalidUsage);
}
static void counts_differ(int rank) {
    DONE(ncclAllReduce(one, two, rank == 1 ? 11 : 10, ncclFloat32, ncclSum, c, s));
    told_apart(rank);
}
static void kinds_differ(int rank) {
    if (rank == 1)
        DONE(ncclAllGather(one, two, 10, ncclFloat32, c, s));
    else
        DONE(ncclAllReduce(one, two, 10, ncclFloat32, ncclSum, c, s));
    told_apart(rank);
}
static void types_differ(int rank) {
    if (rank == 0) DONE(ncclSend(one, 10, ncclFloat32, 1, c, s));
    if (rank == 1) DONE(ncclRecv(two, 10, ncclInt32, 0, c, s));
    rank == 1 ? told_apart(rank) : (void)JOIN(s);
}
static void deadline(int rank) { /* a message that meets a collective: only time tells */
    setenv("EMULATED_NCCL_DEADLINE", "1.5", 1);
    setenv("EMULATED_NCCL_CONNECT", "0", 1);
    if (rank == 1)
        DONE(ncclRecv(two, 10, ncclFloat32, 0, c, s));
    else
        DONE(ncclAllReduce(one, two, 10, ncclFloat32, ncclSum, c, s));
    told_apart(rank);
    MUST(strstr(ncclGetLastError(c), "rank 1: Recv of 10 float32 from rank 0"));
}

enum outcome { ENDS, HANGS, HANGS_UNLESS_EAGER };
static const struct {
    const char *name;
    void (*does)(int);
    int sizes[3];
    enum outcome outcome;
} cases[] = {
    {"sums", sums, {1, 2, 4}, ENDS},
    {"averages", averages, {2, 3, 4}, ENDS},
    {"halves", halves, {2, 3, 4}, ENDS},
    {"scattered", scattered, {1, 3, 4}, ENDS},
    {"rooted", rooted, {2, 3}, ENDS},
    {"around", around, {2, 3, 4}, ENDS},
    {"in_order", in_order, {2}, ENDS},
    {"host_goes_on", host_goes_on, {2}, ENDS},
    {"both_send_first", both_send_first, {2}, HANGS_UNLESS_EAGER},
    {"both_send_first_big", both_send_first_big, {2}, HANGS},
    {"on_two_streams", on_two_streams, {2}, HANGS_UNLESS_EAGER},
    {"on_two_communicators", on_two_communicators, {2}, ENDS},
    {"two_communicators_crossed", two_communicators_crossed, {2}, HANGS},
    {"two_communicators_on_streams", two_communicators_on_streams, {2, 3}, ENDS},
    {"connecting", connecting, {2}, ENDS},
    {"split", split, {2, 4}, ENDS},
    {"devices", devices, {1}, ENDS},
    {"aborting", aborting, {2, 3}, ENDS},
    {"deserted", deserted, {2}, HANGS},
    {"counts_differ", counts_differ, {2, 3}, ENDS},
    {"kinds_differ", kinds_differ, {2, 3}, ENDS},
    {"types_differ", types_differ, {2}, ENDS},
    {"deadline", deadline, {2, 3}, ENDS},
};
/* The host waits for its peer at the first operation, so that these can only be asked without. */
static const char *const UNCONNECTED =
    "host_goes_on both_send_first both_send_first_big on_two_streams on_two_communicators two_communicators_crossed "
    "two_communicators_on_streams";

static int ended(pid_t *ranks, double seconds) { /* 1 as all have ended well, 0 as one hangs, -1 as one has failed */
    int well = 1, left = size;
    for (double waited = 0; left && waited < seconds; usleep(5000), waited += 0.005)
        for (int n = 0, status; n < size; n++)
            if (ranks[n] && waitpid(ranks[n], &status, WNOHANG) == ranks[n]) {
                if (WIFEXITED(status) && WEXITSTATUS(status)) well = -1;
                ranks[n] = 0, left--;
            }
    for (int n = 0; n < size; n++)
        if (ranks[n]) kill(ranks[n], SIGKILL), waitpid(ranks[n], 0, 0);
    return well < 0 ? -1 : !left;
}

int main(void) {
    int failed = 0;
    for (int eager = 0; eager < 2; eager++) {
        setenv("EMULATED_NCCL_EAGER", eager ? "4096" : "-1", 1);
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++)
            for (int m = 0; m < 3 && (size = cases[n].sizes[m]); m++) {
                pid_t ranks[8];
                int hangs = cases[n].outcome == HANGS || (cases[n].outcome == HANGS_UNLESS_EAGER && !eager);
                strstr(UNCONNECTED, cases[n].name) ? setenv("EMULATED_NCCL_CONNECT", "0", 1)
                                                   : unsetenv("EMULATED_NCCL_CONNECT");
                ncclGetUniqueId(&id), ncclGetUniqueId(&other_id);
                for (int rank = 0; rank < size; rank++)
                    if (!(ranks[rank] = fork())) {
                        if (freopen("/dev/null", "w", stdout)) open_up(rank);
                        cases[n].does(rank);
                        exit(0);
                    }
                int found = ended(ranks, hangs ? 0.7 : 30);
                if (found != !hangs) failed = 1;
                printf("%s %s of %d%s: %s\n", found == !hangs ? "right" : "WRONG", cases[n].name, size,
                       eager ? ", eager" : "", found > 0 ? "ends" : found ? "fails" : "hangs");
                fflush(stdout);
            }
    }
    return failed;
}
