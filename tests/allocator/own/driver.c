/* A CUDA runtime and driver without a GPU: memory is addresses that rise, of as many bytes as DRIVER_MEMORY says.
 *
 * It stands for libcudart.so.13, which is all that torch's libc10_cuda.so needs. Nothing is computed, so that no byte
 * is ever touched, and whatever is not about memory succeeds at once. Segments lie far apart, as in the simulation.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { SEGMENTS = 1 << 16 };
static const size_t APART = (size_t)1 << 36, PAGE = 2 << 20;
static struct { size_t address, size; } segments[SEGMENTS];
static size_t count, used, reserved_addresses;

static size_t memory(void) {
    const char *text = getenv("DRIVER_MEMORY");
    return text ? strtoull(text, 0, 10) : (size_t)1 << 36;
}

static size_t rounded(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

static size_t next_address(size_t size) { /* a segment may be longer than the distance of short ones */
    size_t found = APART * (1 + reserved_addresses);
    reserved_addresses += 1 + size / APART;
    return found;
}

cudaError_t cudaMalloc(void **found, size_t size) {
    if (used + size > memory() || count == SEGMENTS) return cudaErrorMemoryAllocation;
    segments[count].address = next_address(size), segments[count].size = size;
    *found = (void *)segments[count++].address;
    used += size;
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    for (size_t n = 0; n < count; n++)
        if (segments[n].address == (size_t)pointer) used -= segments[n].size, segments[n].size = 0;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *all = memory(), *left = *all - used;
    return cudaSuccess;
}

/* ---- pages of expandable segments */

typedef unsigned long long Flags;

CUresult cuMemAddressReserve(CUdeviceptr *found, size_t size, size_t alignment, CUdeviceptr where, Flags flags) {
    *found = next_address(size);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) { return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *found, size_t size, const CUmemAllocationProp *kind, Flags flags) {
    if (used + size > memory()) return CUDA_ERROR_OUT_OF_MEMORY;
    used += size;
    *found = size;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    used -= handle;
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle, Flags flags) {
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) { return CUDA_SUCCESS; }
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count) {
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(
    size_t *found, const CUmemAllocationProp *kind, CUmemAllocationGranularity_flags which) {
    return *found = PAGE, CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *found, int number) { return *found = number, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *found, CUdevice_attribute which, CUdevice device) { return *found = 0, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **found) { return *found = "an error", CUDA_SUCCESS; }

static CUresult succeed(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, Flags flags, enum cudaDriverEntryPointQueryResult *result) {
    Dl_info self;
    void *here = dladdr((void *)succeed, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : 0;
    void *known = here ? dlsym(here, name) : 0;
    *found = known ? known : (void *)succeed;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- one device, on which all has been done already */

cudaError_t cudaGetDeviceCount(int *found) { return *found = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *found) { return *found = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *found) { return *found = 13000, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    found->major = 9, found->totalGlobalMem = memory();
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t error) { return "error"; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in for CUDA"; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *found) {
    return *found = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *found, int device, int other) { return *found = 0, cudaSuccess; }

