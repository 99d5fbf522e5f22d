/* A CUDA runtime without a GPU: devices, memory and copies. `streams.c` has streams and events, `driver.c` the driver.
 *
 * The memory of a device is memory of this machine, in files without names, so that other processes can map it; a
 * device has EMULATED_CUDA_MEMORY bytes (80 GiB unless told), over all processes. There are EMULATED_CUDA_DEVICES of
 * them (four unless told), of which CUDA_VISIBLE_DEVICES shows some. Pages are taken when they are touched. What torch
 * asks of a device is answered as an H100 would. Kernels cannot run: a launch fails, and says the kernel's name.
 */
#include "emulated.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- errors */

static __thread cudaError_t last;
cudaError_t failed(cudaError_t error) { return error ? last = error : error; }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaGetLastError(void) {
    cudaError_t found = last;
    return last = cudaSuccess, found;
}
static const struct {
    cudaError_t error;
    const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
};
const char *cudaGetErrorName(cudaError_t error) {
    for (size_t n = 0; n < sizeof ERRORS / sizeof *ERRORS; n++)
        if (ERRORS[n].error == error) return ERRORS[n].name;
    return "an error of the emulation";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (size_t n = 0; n < sizeof ERRORS / sizeof *ERRORS; n++)
        if (ERRORS[n].error == error) return ERRORS[n].text;
    return "an error of the emulation";
}

/* ---- devices */

static int visible[MOST_DEVICES], shown = -1; /* the devices of the machine that this process sees */
static __thread int current;
static pid_t began; /* the process that looked at the devices: its forks may not use them, as with CUDA */
size_t device_bytes;

static void look(void) {
    if (shown >= 0) return;
    const char *count = getenv("EMULATED_CUDA_DEVICES"), *memory = getenv("EMULATED_CUDA_MEMORY");
    const char *only = getenv("CUDA_VISIBLE_DEVICES");
    int all = count ? atoi(count) : 4;
    device_bytes = memory ? strtoull(memory, 0, 10) : (size_t)80 << 30;
    if (all > MOST_DEVICES) all = MOST_DEVICES;
    int seen = 0;
    if (!only) {
        for (; seen < all; seen++) visible[seen] = seen;
    } else {
        for (const char *at = only; *at && seen < MOST_DEVICES;) { /* what is no number ends the list, as in CUDA */
            char *end;
            long number = strtol(at, &end, 10);
            if (end == at || number < 0 || number >= all) break;
            visible[seen++] = (int)number;
            at = *end == ',' ? end + 1 : end;
        }
    }
    shown = seen;
}
int physical(int device) { return look(), visible[device]; }
cudaError_t cudaGetDeviceCount(int *found) {
    look();
    return *found = shown, shown ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *found) { return *found = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    look();
    if (device < 0 || device >= shown) return failed(cudaErrorInvalidDevice);
    if (!began) began = getpid();
    if (began != getpid()) return failed(cudaErrorInitializationError); /* forked from a process that uses CUDA */
    return current = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *found) { return *found = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *found) { return *found = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    look();
    if (device < 0 || device >= shown) return failed(cudaErrorInvalidDevice);
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "Emulated H100 80GB");
    memcpy(found->uuid.bytes, "emulated H100 n", 15);
    found->uuid.bytes[15] = (char)('0' + visible[device]);
    found->totalGlobalMem = device_bytes, found->major = 9, found->minor = 0;
    found->sharedMemPerBlock = 49152, found->sharedMemPerBlockOptin = 232448,
    found->sharedMemPerMultiprocessor = 233472;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536, found->warpSize = 32;
    found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048, found->multiProcessorCount = 132;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
    found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->totalConstMem = 65536, found->textureAlignment = 512, found->l2CacheSize = 50 << 20;
    found->memoryBusWidth = 5120, found->pciBusID = visible[device] + 1, found->asyncEngineCount = 3;
    found->concurrentKernels = found->unifiedAddressing = found->canMapHostMemory = found->managedMemory = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *found, enum cudaDeviceAttr which, int device) {
    struct cudaDeviceProp of;
    cudaError_t error = cudaGetDeviceProperties(&of, device);
    if (error) return error;
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *found = of.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *found = (int)of.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *found = (int)of.sharedMemPerBlockOptin; break;
    case cudaDevAttrMultiProcessorCount: *found = of.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *found = of.major; break;
    case cudaDevAttrComputeCapabilityMinor: *found = of.minor; break;
    case cudaDevAttrWarpSize: *found = of.warpSize; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *found = 1; break;
    default: *found = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *found, int size, int device) {
    return snprintf(found, size, "0000:%02x:00.0", physical(device) + 1), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *found, int device, int other) { return *found = device != other, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* ---- how much of each device is taken: a table in shared memory, with a row for each process that lives */

enum { ROWS = 512 };
typedef struct {
    pid_t process;
    size_t taken[MOST_DEVICES];
} Row;
static Row *table, *mine;
static int table_file = -1;

static void open_table(void) {
    if (mine && mine->process == getpid()) return;
    char name[64];
    snprintf(name, sizeof name, "/dev/shm/emulated-cuda-%d", (int)getuid());
    if (table_file < 0) {
        table_file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (table_file < 0 || ftruncate(table_file, ROWS * sizeof(Row))) perror(name), abort();
        table = mmap(0, ROWS * sizeof(Row), PROT_READ | PROT_WRITE, MAP_SHARED, table_file, 0);
    }
    flock(table_file, LOCK_EX);
    for (int n = 0; n < ROWS; n++)
        if (!table[n].process || (kill(table[n].process, 0) && errno == ESRCH) || table[n].process == getpid()) {
            memset(mine = &table[n], 0, sizeof *mine);
            mine->process = getpid();
            break;
        }
    flock(table_file, LOCK_UN);
}
size_t taken(int number) {
    size_t sum = 0;
    open_table();
    for (int n = 0; n < ROWS; n++)
        if (table[n].process && !(kill(table[n].process, 0) && errno == ESRCH)) sum += table[n].taken[number];
    return sum;
}
int take(int number, size_t size) { /* whether there was so much */
    open_table();
    flock(table_file, LOCK_EX);
    int fits = taken(number) + size <= device_bytes;
    if (fits) mine->taken[number] += size;
    flock(table_file, LOCK_UN);
    return fits;
}
void give(int number, size_t size) { mine->taken[number] -= size; }

/* ---- memory */

static Block *blocks;
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void remember(Block block) {
    pthread_mutex_lock(&lock);
    if (count == room) blocks = realloc(blocks, (room = room ? 2 * room : 256) * sizeof *blocks);
    blocks[count++] = block;
    pthread_mutex_unlock(&lock);
}
int find(const void *pointer, Block *found) { /* the block that an address is in */
    int there = 0;
    pthread_mutex_lock(&lock);
    for (size_t n = 0; n < count && !there; n++)
        if ((char *)pointer >= blocks[n].start && (char *)pointer < blocks[n].start + blocks[n].size)
            *found = blocks[n], there = 1;
    pthread_mutex_unlock(&lock);
    return there;
}
int forget(const void *pointer, Block *found) { /* the block that begins at an address is no more */
    int there = 0;
    pthread_mutex_lock(&lock);
    for (size_t n = 0; n < count && !there; n++)
        if (blocks[n].start == pointer) *found = blocks[n], blocks[n] = blocks[--count], there = 1;
    pthread_mutex_unlock(&lock);
    return there;
}

size_t whole_pages(size_t size) { return (size + DEVICE_PAGE - 1) / DEVICE_PAGE * DEVICE_PAGE; }
int memory_file(size_t size) {
    int file = memfd_create("emulated-cuda", MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, (off_t)size)) close(file), file = -1;
    return file;
}

void *place(size_t size) { /* addresses rise, as those of a GPU do while none is given back */
    static _Atomic size_t next = (size_t)1 << 45;
    return (void *)__atomic_fetch_add((size_t *)&next, whole_pages(size) + DEVICE_PAGE, __ATOMIC_RELAXED);
}

cudaError_t cudaMalloc(void **found, size_t size) {
    size_t whole = whole_pages(size);
    int number = physical(current);
    if (!size) return *found = 0, cudaSuccess;
    if (!take(number, whole)) return failed(cudaErrorMemoryAllocation);
    int file = memory_file(whole);
    void *start = file < 0 ? MAP_FAILED : mmap(place(whole), whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (start == MAP_FAILED) return give(number, whole), failed(cudaErrorMemoryAllocation);
    if (getenv("EMULATED_CUDA_POISON")) memset(start, 0xFF, whole); /* what nobody has written is not a number */
    remember((Block){DEVICE, current, start, whole, file, whole});
    return *found = start, cudaSuccess;
}
cudaError_t cudaFree(void *pointer) {
    Block block;
    if (!pointer) return cudaSuccess;
    cudaDeviceSynchronize();
    if (!forget(pointer, &block)) return failed(cudaErrorInvalidValue);
    munmap(block.start, block.size), close(block.file);
    give(physical(block.device), block.size);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *all = (look(), device_bytes);
    size_t used = taken(physical(current));
    return *left = used < *all ? *all - used : 0, cudaSuccess;
}
cudaError_t cudaHostAlloc(void **found, size_t size, unsigned flags) {
    void *start = mmap(0, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    remember((Block){PINNED, current, start, size ? size : 1, -1, size});
    return *found = start, cudaSuccess;
}
cudaError_t cudaFreeHost(void *pointer) {
    Block block;
    cudaDeviceSynchronize();
    if (!forget(pointer, &block)) return failed(cudaErrorInvalidValue);
    return munmap(block.start, block.size), cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    return remember((Block){REGISTERED, current, pointer, size, -1, size}), cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) {
    Block block;
    return forget(pointer, &block) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
    Block block;
    memset(found, 0, sizeof *found);
    found->hostPointer = (void *)pointer;
    if (!find(pointer, &block)) return found->type = cudaMemoryTypeUnregistered, found->device = -1, cudaSuccess;
    int there = block.kind == DEVICE || block.kind == MAPPED;
    found->type = there ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    found->device = block.device, found->devicePointer = (void *)pointer;
    if (there) found->hostPointer = 0;
    return cudaSuccess;
}

/* ---- copies: queued on their stream, unless a side is memory that the device cannot reach by itself */

typedef struct {
    char *target;
    const char *source;
    size_t size;
    int value, owned;
} Copy;
static void carry(void *argument) {
    Copy *copy = argument;
    if (copy->source)
        memmove(copy->target, copy->source, copy->size);
    else
        memset(copy->target, copy->value, copy->size);
    if (copy->owned) free((void *)copy->source);
    free(copy);
}
static int reaches(const char *pointer, size_t size, int *pageable) { /* whether all of it is memory of one kind */
    Block block;
    const char *end = pointer + size;
    if ((*pageable = !find(pointer, &block))) return 1;
    while (block.start + block.size < end)
        if (!find(block.start + block.size, &block)) return 0;
    return 1;
}
static cudaError_t queued(void *target, const void *source, int value, size_t size, cudaStream_t stream) {
    int to_pageable, from_pageable = 0;
    if (!size) return cudaSuccess;
    if (!reaches(target, size, &to_pageable) || (source && !reaches(source, size, &from_pageable))) {
        fprintf(stderr, "emulated CUDA: %zu bytes from %p to %p are not all memory of one allocation\n", size, source,
                target);
        return failed(cudaErrorInvalidValue);
    }
    Copy *copy = malloc(sizeof *copy);
    *copy = (Copy){target, source, size, value, from_pageable};
    if (from_pageable) copy->source = memcpy(malloc(size), source, size);
    enqueue(stream, carry, copy);
    return to_pageable ? cudaStreamSynchronize(stream) : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return queued(target, source, 0, size, stream);
}
cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size, cudaStream_t stream) {
    return queued(target, source, 0, size, stream);
}
cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = queued(target, source, 0, size, 0);
    return error ? error : cudaStreamSynchronize(0);
}
cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error =
            queued((char *)target + row * target_pitch, (const char *)source + row * source_pitch, 0, width, stream);
    return error;
}
cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    return queued(target, 0, value, size, stream);
}
cudaError_t cudaMemset(void *target, int value, size_t size) {
    cudaError_t error = queued(target, 0, value, size, 0);
    return error ? error : cudaStreamSynchronize(0);
}

/* ---- memory of other processes: a handle says whose file it is */

typedef struct {
    pid_t process;
    int file, device;
    size_t size;
} Handle;
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    Block block;
    if (!find(pointer, &block) || block.kind != DEVICE || block.file < 0) return failed(cudaErrorInvalidValue);
    memset(handle, 0, sizeof *handle);
    *(Handle *)handle = (Handle){getpid(), block.file, physical(block.device), block.size};
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **found, cudaIpcMemHandle_t handle, unsigned flags) {
    Handle told = *(Handle *)&handle;
    char name[64];
    if (told.process == getpid()) return failed(cudaErrorInvalidValue); /* CUDA refuses it, too */
    snprintf(name, sizeof name, "/proc/%d/fd/%d", (int)told.process, told.file);
    int file = open(name, O_RDWR | O_CLOEXEC);
    void *start = file < 0 ? MAP_FAILED : mmap(0, told.size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (start == MAP_FAILED) return failed(cudaErrorInvalidValue);
    close(file);
    remember((Block){MAPPED, current, start, told.size, -1, told.size});
    return *found = start, cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    return cudaFreeHost(pointer); /* here both are a mapping that ends */
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    return memset(handle, 0, sizeof *handle),
           cudaEventSynchronize(event); /* whoever opens it has nothing to wait for */
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    return cudaEventCreateWithFlags(event, cudaEventDisableTiming | cudaEventInterprocess);
}

/* ---- kernels: their names are known, and none runs */

typedef struct {
    const void *function;
    const char *name;
} Kernel;
static Kernel *kernels;
static size_t known, places;
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 0; }
void __cudaRegisterVar(void) {}
void __cudaRegisterFunction(void **handle, const char *function, char *there, const char *name, int threads, void *a,
                            void *b, void *c, void *d, int *size) {
    if (known == places) kernels = realloc(kernels, (places = places ? 2 * places : 1 << 14) * sizeof *kernels);
    kernels[known++] = (Kernel){function, name};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared;
    return configuration.stream = stream, 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    return *(void **)stream = configuration.stream, cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    return *kernel = (cudaKernel_t)function, cudaSuccess;
}
static cudaError_t launched(const void *function) {
    const char *name = "of no name";
    for (size_t n = 0; n < known; n++)
        if (kernels[n].function == function) name = kernels[n].name;
    fprintf(stderr, "emulated CUDA: the kernel %s cannot run here\n", name);
    if (getenv("EMULATED_CUDA_ABORT")) abort();
    return failed(cudaErrorInvalidDeviceFunction);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launched(function);
}
cudaError_t __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launched(function);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launched(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
    return launched(function);
}
