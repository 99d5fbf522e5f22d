/* The CUDA driver and NVML of the emulation: pages for expandable segments, addresses, and what torch asks of them. */
#include "emulated.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long Flags;
static CUresult as_driver(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? CUDA_ERROR_OUT_OF_MEMORY
           : error                            ? CUDA_ERROR_INVALID_VALUE
                                              : CUDA_SUCCESS;
}

/* ---- pages */

typedef struct {
    int file, device;
    size_t size;
} Pages;
CUresult cuMemAddressReserve(CUdeviceptr *found, size_t size, size_t alignment, CUdeviceptr where, Flags flags) {
    void *start = mmap(place(size), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : (*found = (CUdeviceptr)start, CUDA_SUCCESS);
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) { return munmap((void *)pointer, size), CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *found, size_t size, const CUmemAllocationProp *kind, Flags flags) {
    int device = kind->location.id;
    if (!take(physical(device), size)) return CUDA_ERROR_OUT_OF_MEMORY;
    Pages *pages = malloc(sizeof *pages);
    *pages = (Pages){memory_file(size), device, size};
    return *found = (CUmemGenericAllocationHandle)pages, CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Pages *pages = (Pages *)handle;
    give(physical(pages->device), pages->size), close(pages->file), free(pages);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle, Flags flags) {
    Pages *pages = (Pages *)handle;
    void *start =
        mmap((void *)pointer, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages->file, (off_t)offset);
    if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    remember((Block){DEVICE, pages->device, start, size, -1, size});
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
    Block block;
    cudaDeviceSynchronize();
    for (size_t at = 0; at < size && forget((char *)pointer + at, &block); at += block.size);
    mmap((void *)pointer, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *access, size_t count) {
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *found, const CUmemAllocationProp *kind,
                                       CUmemAllocationGranularity_flags which) {
    return *found = DEVICE_PAGE, CUDA_SUCCESS;
}

/* ---- addresses */

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    return as_driver(cudaMemcpyAsync((void *)target, (void *)source, size, cudaMemcpyDefault, stream));
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr pointer) {
    Block block;
    if (!find((void *)pointer, &block)) return CUDA_ERROR_NOT_FOUND;
    if (start) *start = (CUdeviceptr)block.start;
    if (size) *size = block.size;
    return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer) {
    return as_driver(cudaIpcGetMemHandle((cudaIpcMemHandle_t *)handle, (void *)pointer));
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *found, CUipcMemHandle handle, unsigned flags) {
    cudaIpcMemHandle_t told;
    memcpy(&told, &handle, sizeof told);
    return as_driver(cudaIpcOpenMemHandle((void **)found, told, flags));
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) { return as_driver(cudaIpcCloseMemHandle((void *)pointer)); }
CUresult cuPointerGetAttribute(void *found, CUpointer_attribute which, CUdeviceptr pointer) {
    Block block;
    if (!find((void *)pointer, &block)) return CUDA_ERROR_INVALID_VALUE;
    memset(found, 0, 4);
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)found = block.device;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **found) {
    return *found = "an error of the emulated driver", CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **found) {
    *found = error == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
             : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
             : error == CUDA_ERROR_NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
                                                 : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

/* ---- devices */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *found, int number) { return *found = number, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *found) { return as_driver(cudaGetDeviceCount(found)); }
CUresult cuDeviceGetAttribute(int *found, CUdevice_attribute which, CUdevice device) {
    return as_driver(cudaDeviceGetAttribute(found, (enum cudaDeviceAttr)which, device));
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS; /* torch asks before it takes a device that it would make one on */
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
    return *found = (CUcontext)(long)(device + 1), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *found) {
    int device;
    cudaGetDevice(&device);
    return *found = (CUcontext)(long)(device + 1), CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return as_driver(cudaSetDevice((int)(long)context - 1)); }

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, Flags flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    char newer[128];
    Dl_info self;
    void *here = dladdr((void *)not_supported, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : 0;
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *known = here ? dlsym(here, name) : 0;
    if (here && !known) known = dlsym(here, newer);
    *found = known ? known : (void *)not_supported;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* ---- NVML: devices that can be counted, without links between them */

typedef int nvmlReturn;
enum { NVML_NOT_SUPPORTED = 3 };
nvmlReturn nvmlInit_v2(void) { return 0; }
nvmlReturn nvmlInit(void) { return 0; }
nvmlReturn nvmlShutdown(void) { return 0; }
nvmlReturn nvmlDeviceGetCount_v2(unsigned *found) {
    const char *count = getenv("EMULATED_CUDA_DEVICES");
    return *found = count ? (unsigned)atoi(count) : 4, 0; /* all of the machine, whatever is visible */
}
nvmlReturn nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **found) {
    unsigned number = 1;
    sscanf(bus, "%*x:%x", &number);
    return *found = (void *)(long)number, 0;
}
nvmlReturn nvmlDeviceGetHandleByIndex_v2(unsigned number, void **found) {
    return *found = (void *)(long)(number + 1), 0;
}
nvmlReturn nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
nvmlReturn nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
nvmlReturn nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { return *count = 0, 0; }
nvmlReturn nvmlSystemGetCudaDriverVersion_v2(int *found) { return *found = 13000, 0; }
nvmlReturn nvmlDeviceGetGpuFabricInfoV(void *device, void *found) { return 0; } /* zeros: it has no fabric */
const char *nvmlErrorString(nvmlReturn error) { return "an error of the emulated NVML"; }

/* ---- what torch asks the other libraries, to choose between them */

size_t cudnnGetVersion(void) { return 91002; } /* cuDNN's attention does not come first */
size_t cudnnGetCudartVersion(void) { return 13000; }
