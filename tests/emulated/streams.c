/* Streams and events of a CUDA without a GPU: a stream is a thread with a queue, and the host does not wait.
 *
 * Copies, callbacks and NCCL's operations are work that a stream does in its order, some time after the call returned.
 * So a read that nothing joined to its copy finds old bytes here as it would on a GPU. A stream's thread starts with
 * its first work: a process may fork as long as it has not used any. Streams are as torch makes them, not blocking:
 * the null stream of a device is a stream like any other.
 *
 * One lock and one condition serve all, since a process has a few streams and no more than a few processors.
 * EMULATED_LATE=0.002 makes every piece of work begin that many seconds late, and 0-0.002 each by another number of
 * seconds up to that many.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { DEVICES = 64 };

struct work {
    void (*does)(void *);
    void *argument;
    struct work *next;
};

struct CUstream_st {
    int device, priority, started, ends;
    unsigned flags;
    unsigned long long queued, done; /* pieces of work, ever */
    struct work *first, **last;
};

struct recording { /* one call of cudaEventRecord: an event may be recorded again while others wait for this one */
    int holders, done;
    double seconds;
};

struct CUevent_st {
    struct recording *recording;
    unsigned flags;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct CUstream_st null_streams[DEVICES], *streams[1 << 14];
static size_t count;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static struct CUstream_st *known(cudaStream_t stream) { /* 1 and 2 name the null stream as well: legacy, per thread */
    if ((size_t)stream > 2) return stream;
    int device = 0;
    cudaGetDevice(&device);
    null_streams[device].device = device;
    return &null_streams[device];
}

/* ---- a queue and its thread */

static void *work_of(void *argument) {
    struct CUstream_st *stream = argument;
    char *text = getenv("EMULATED_LATE"), *range = text;
    double least = text ? strtod(text, &range) : 0, most = range && *range == '-' ? atof(range + 1) : least;
    unsigned draws = (unsigned)getpid() * 2654435761u ^ (unsigned)(size_t)stream;
    cudaSetDevice(stream->device);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->ends) pthread_cond_wait(&changed, &lock);
        struct work *work = stream->first;
        if (!work) break;
        pthread_mutex_unlock(&lock);
        double late = least + (most - least) * rand_r(&draws) / RAND_MAX;
        if (late > 0) usleep((useconds_t)(1e6 * late));
        work->does(work->argument);
        pthread_mutex_lock(&lock);
        if (!(stream->first = work->next)) stream->last = &stream->first;
        free(work);
        stream->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    free(stream);
    return 0;
}

static void start(struct CUstream_st *stream) {
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, work_of, stream)) abort();
    pthread_attr_destroy(&detached);
    stream->started = 1, stream->last = &stream->first;
}

/* Have `does(argument)` done by a stream, after all that was given to it before. */
void enqueue(cudaStream_t given, void (*does)(void *), void *argument) {
    struct CUstream_st *stream = known(given);
    struct work *work = malloc(sizeof *work);
    if (!work) abort();
    *work = (struct work){does, argument, 0};
    pthread_mutex_lock(&lock);
    if (!stream->started) start(stream);
    *stream->last = work, stream->last = &work->next;
    stream->queued++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void settle(struct CUstream_st *stream) { /* with the lock: wait for what is queued now, not for what follows */
    unsigned long long ticket = stream->queued;
    while (stream->done < ticket) pthread_cond_wait(&changed, &lock);
}

/* ---- streams */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *found, unsigned flags, int priority) {
    struct CUstream_st *made = calloc(1, sizeof *made);
    if (!made) return cudaErrorMemoryAllocation;
    cudaGetDevice(&made->device);
    made->flags = flags, made->priority = priority;
    pthread_mutex_lock(&lock);
    if (count == sizeof streams / sizeof *streams) abort();
    streams[count++] = made;
    pthread_mutex_unlock(&lock);
    return *found = made, cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *found, unsigned flags) {
    return cudaStreamCreateWithPriority(found, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *found) { return cudaStreamCreateWithPriority(found, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) { /* what is queued will still be done */
    pthread_mutex_lock(&lock);
    for (size_t n = 0; n < count; n++)
        if (streams[n] == stream) streams[n] = streams[--count];
    stream->ends = 1;
    if (!stream->started) free(stream);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    settle(known(stream));
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t given) {
    struct CUstream_st *stream = known(given);
    pthread_mutex_lock(&lock);
    int idle = stream->done == stream->queued;
    pthread_mutex_unlock(&lock);
    return idle ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void) {
    int device = 0;
    cudaGetDevice(&device);
    pthread_mutex_lock(&lock);
    settle(&null_streams[device]);
    for (size_t n = 0; n < count; n++)
        if (streams[n]->device == device) settle(streams[n]);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *found) {
    return *found = known(stream)->priority, cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *found) {
    return *found = known(stream)->flags, cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *found) { return *found = known(stream)->device, cudaSuccess; }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *found) {
    return *found = (size_t)known(stream), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *found) {
    return *found = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *found, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *edge_count) {
    return *found = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t does, void *argument) {
    return enqueue(stream, does, argument), cudaSuccess;
}

struct callback {
    cudaStream_t stream;
    cudaStreamCallback_t does;
    void *argument;
};
static void call_back(void *argument) {
    struct callback callback = *(struct callback *)argument;
    free(argument);
    callback.does(callback.stream, cudaSuccess, callback.argument);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t does, void *argument, unsigned flags) {
    struct callback *callback = malloc(sizeof *callback);
    if (!callback) return cudaErrorMemoryAllocation;
    *callback = (struct callback){stream, does, argument};
    return enqueue(stream, call_back, callback), cudaSuccess;
}

/* ---- events */

static void let_go(struct recording *recording) { /* with the lock */
    if (recording && --recording->holders == 0) free(recording);
}

static void mark(void *argument) {
    struct recording *recording = argument;
    pthread_mutex_lock(&lock);
    recording->seconds = now(), recording->done = 1;
    let_go(recording);
    pthread_mutex_unlock(&lock);
}

static void wait_for(void *argument) {
    struct recording *recording = argument;
    pthread_mutex_lock(&lock);
    while (!recording->done) pthread_cond_wait(&changed, &lock);
    let_go(recording);
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *found, unsigned flags) {
    struct CUevent_st *made = calloc(1, sizeof *made);
    if (!made) return cudaErrorMemoryAllocation;
    made->flags = flags;
    return *found = made, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *found) { return cudaEventCreateWithFlags(found, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    pthread_mutex_lock(&lock);
    let_go(event->recording);
    pthread_mutex_unlock(&lock);
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    struct recording *made = calloc(1, sizeof *made);
    if (!made) return cudaErrorMemoryAllocation;
    made->holders = 2; /* the event, and the work that marks it */
    pthread_mutex_lock(&lock);
    let_go(event->recording);
    event->recording = made;
    pthread_mutex_unlock(&lock);
    return enqueue(stream, mark, made), cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    pthread_mutex_lock(&lock);
    struct recording *awaited = event->recording;
    if (awaited && !awaited->done)
        awaited->holders++;
    else
        awaited = 0; /* an event that was never recorded is complete */
    pthread_mutex_unlock(&lock);
    if (awaited) enqueue(stream, wait_for, awaited);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    pthread_mutex_lock(&lock);
    int done = !event->recording || event->recording->done;
    pthread_mutex_unlock(&lock);
    return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    pthread_mutex_lock(&lock);
    struct recording *awaited = event->recording;
    if (awaited) {
        awaited->holders++;
        while (!awaited->done) pthread_cond_wait(&changed, &lock);
        let_go(awaited);
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (!start->recording || !end->recording)
        error = cudaErrorInvalidResourceHandle;
    else if (!start->recording->done || !end->recording->done)
        error = cudaErrorNotReady;
    else
        *milliseconds = (float)(1e3 * (end->recording->seconds - start->recording->seconds));
    pthread_mutex_unlock(&lock);
    return error;
}
