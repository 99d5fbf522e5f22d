/* What the parts of the emulation share. Functions that begin with cuda, cu and nvml are NVIDIA's, as its headers say.
 */
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>

enum { MOST_DEVICES = 16, DEVICE_PAGE = 2 << 20 };
typedef enum { DEVICE, PINNED, REGISTERED, MAPPED } Kind;
typedef struct {
    Kind kind;
    int device; /* as this process numbers them */
    char *start;
    size_t size;
    int file; /* of a device's memory, else -1 */
    size_t asked;
} Block;

cudaError_t failed(cudaError_t error); /* remembered for cudaGetLastError */
int physical(int device);              /* the number that all processes have for a device */
extern size_t device_bytes;
size_t taken(int number);          /* of a device, by all processes */
int take(int number, size_t size); /* whether a device had so much left */
void give(int number, size_t size);
void remember(Block block);
int find(const void *pointer, Block *found);
int forget(const void *pointer, Block *found);
size_t whole_pages(size_t size);
int memory_file(size_t size);
void *place(size_t size);                                                /* where memory of a device may be */
void enqueue(cudaStream_t stream, void (*work)(void *), void *argument); /* runs in the order of its stream */
