/* cuBLAS of the emulation: what torch asks it before a product, so that torch allocates its workspaces. Products
 * themselves are operators of `kernels.cpp`. A handle is an address.
 */
#include <stddef.h>
#include <stdlib.h>

typedef int cublasStatus;
cublasStatus cublasCreate_v2(void **handle) { return *handle = malloc(1), 0; }
cublasStatus cublasDestroy_v2(void *handle) { return free(handle), 0; }
cublasStatus cublasSetStream_v2(void *handle, void *stream) { return 0; }
cublasStatus cublasSetWorkspace_v2(void *handle, void *workspace, size_t size) { return 0; }
cublasStatus cublasSetMathMode(void *handle, int mode) { return 0; }
