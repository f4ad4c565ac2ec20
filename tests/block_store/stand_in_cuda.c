/* A stand-in for libcuda.so.1: everything above the driver runs without a GPU, with real processes and real IPC.
 *
 * "Device memory" is POSIX shared memory. A piece is a file named <STAND_IN_CUDA>-<pid>-<number> in /dev/shm. Its first
 * page holds its size and is not mapped. Its device pointer is the address of the mapping, so numpy can read and write
 * it. An IPC handle holds the name. Two bytes of the file carry OFD locks, which the kernel drops when a process ends:
 * byte 0 is locked by the owner, byte 1 by every process that has the piece mapped. As with the driver:
 *  - a handle is void once its owner has ended or freed the piece; open mappings stay valid and count as used;
 *  - the process that made a handle cannot open it; a second open returns the same pointer and is counted;
 *  - calls on memory need a current context, and every call needs cuInit;
 *  - a memset or a copy to the device takes effect when something waits for it: a later copy of this process or
 *    cuCtxSynchronize.
 * It does not reproduce other asynchrony, other address spaces, or a real driver's treatment of mappings whose owner
 * has died.
 *
 * Environment (default): STAND_IN_CUDA (prefix of names, required), STAND_IN_CUDA_DEVICES (1), STAND_IN_CUDA_BYTES per
 * device (64 MiB), STAND_IN_CUDA_NO_IPC (if set, export is not supported), STAND_IN_CUDA_FIRST (first visible device,
 * 0), STAND_IN_CUDA_FAILS (name of a call that fails: cuMemsetD8_v2 or cuCtxSynchronize).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400, NOT_SUPPORTED = 801 };
#define HEAD 4096
#define MAX_PIECES 64
#define MAX_DEVICES 8
#define MAX_DEPTH 8

typedef struct { char reserved[64]; } Handle;
typedef struct { char name[48]; int fd, device, opened; size_t bytes; char *at; } Piece;
typedef struct { size_t bytes; int device, pid; } Head;

static Piece pieces[MAX_PIECES];
static int initialised, serial, retained[MAX_DEVICES];
static struct { char *at, *copy; size_t bytes; unsigned char value; } fill; /* a pending memset or copy */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int stack[MAX_DEPTH], depth; /* contexts: device number + 1 */

static long number(const char *name, long otherwise) { char *text = getenv(name); return text ? atol(text) : otherwise; }
static const char *prefix(void) { char *text = getenv("STAND_IN_CUDA"); return text ? text : "stand-in-cuda"; }
static int devices(void) { return (int)number("STAND_IN_CUDA_DEVICES", 1); }
static int current(void) { return depth ? stack[depth - 1] - 1 : -1; }
#define MAY_FAIL() do { char *name = getenv("STAND_IN_CUDA_FAILS"); if (name && !strcmp(name, __func__)) return INVALID_VALUE; } while (0)
#define NEED_CONTEXT() do { if (!initialised) return NOT_INITIALIZED; if (current() < 0) return INVALID_CONTEXT; } while (0)

static void finish_fill(void) {
    pthread_mutex_lock(&lock);
    if (fill.at && fill.copy) memcpy(fill.at, fill.copy, fill.bytes);
    else if (fill.at) memset(fill.at, fill.value, fill.bytes);
    free(fill.copy);
    fill.at = fill.copy = NULL;
    pthread_mutex_unlock(&lock);
}

static int lock_byte(int fd, int byte, short type, int command, short *found) {
    struct flock range = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int failed = fcntl(fd, command, &range);
    if (found) *found = range.l_type;
    return failed;
}

static int is_locked(int fd, int byte) {
    short found = F_UNLCK;
    lock_byte(fd, byte, F_WRLCK, F_OFD_GETLK, &found);
    return found != F_UNLCK;
}

/* Bytes of a device that a live process has mapped. Removes the files of processes that have ended. */
static size_t used_bytes(int device) {
    size_t used = 0;
    DIR *directory = opendir("/dev/shm");
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        if (strncmp(entry->d_name, prefix(), strlen(prefix())) || entry->d_name[strlen(prefix())] != '-') continue;
        int fd = shm_open(entry->d_name, O_RDWR, 0);
        Head head = {0};
        if (fd < 0) continue;
        if (pread(fd, &head, sizeof head, 0) == sizeof head) {
            if (!is_locked(fd, 0) && !is_locked(fd, 1)) shm_unlink(entry->d_name);
            else if (head.device == device) used += head.bytes;
        }
        close(fd);
    }
    if (directory) closedir(directory);
    return used;
}

static Piece *piece_at(uint64_t pointer) {
    for (int i = 0; i < MAX_PIECES; i++)
        if (pieces[i].at && pointer >= (uint64_t)pieces[i].at && pointer < (uint64_t)pieces[i].at + pieces[i].bytes)
            return &pieces[i];
    return NULL;
}

static Piece *map_piece(const char *name, int fd, size_t bytes, int device, int opened) {
    for (int i = 0; i < MAX_PIECES; i++) {
        if (pieces[i].at) continue;
        char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, HEAD);
        if (at == MAP_FAILED) return NULL;
        lock_byte(fd, 1, F_RDLCK, F_OFD_SETLK, NULL);
        snprintf(pieces[i].name, sizeof pieces[i].name, "%s", name);
        pieces[i].fd = fd, pieces[i].bytes = bytes, pieces[i].device = device, pieces[i].opened = opened;
        pieces[i].at = at;
        return &pieces[i];
    }
    return NULL;
}

static void unmap_piece(Piece *piece) {
    munmap(piece->at, piece->bytes);
    close(piece->fd);
    piece->at = NULL;
}

int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (devices() < 1) return NO_DEVICE;
    initialised = 1;
    return OK;
}

int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; return OK;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; return OK;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; return OK;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return OK;
    case MAP_FAILED_: *name = "CUDA_ERROR_MAP_FAILED"; return OK;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; return OK;
    case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; return OK;
    default: *name = NULL; return INVALID_VALUE;
    }
}

int cuDeviceGetCount(int *count) {
    if (!initialised) return NOT_INITIALIZED;
    *count = devices();
    return OK;
}

/* Handles number the machine's devices, ordinals those that the process sees, as with CUDA_VISIBLE_DEVICES. */
int cuDeviceGet(int *device, int ordinal) {
    if (!initialised) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *device = (ordinal + (int)number("STAND_IN_CUDA_FIRST", 0)) % MAX_DEVICES;
    return OK;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    if (!initialised) return NOT_INITIALIZED;
    memset(uuid, 0x5a, 16);
    uuid[15] = (char)device;
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (!initialised) return NOT_INITIALIZED;
    retained[device]++;
    *context = (void *)(intptr_t)(device + 1);
    return OK;
}

int cuCtxPushCurrent_v2(void *context) {
    int device = (int)(intptr_t)context - 1;
    if (device < 0 || device >= MAX_DEVICES || !retained[device] || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = device + 1;
    return OK;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(intptr_t)stack[--depth];
    return OK;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    NEED_CONTEXT();
    size_t used = used_bytes(current());
    *total = (size_t)number("STAND_IN_CUDA_BYTES", 64 << 20);
    *free_bytes = used < *total ? *total - used : 0;
    return OK;
}

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    size_t free_bytes, total;
    int failed = cuMemGetInfo_v2(&free_bytes, &total);
    if (failed) return failed;
    if (!bytes) return INVALID_VALUE;
    if (bytes > free_bytes) return OUT_OF_MEMORY;
    char name[48];
    pthread_mutex_lock(&lock);
    snprintf(name, sizeof name, "%s-%d-%d", prefix(), getpid(), serial++);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    Head head = {bytes, current(), getpid()};
    Piece *piece = NULL;
    if (fd >= 0 && !ftruncate(fd, (off_t)(HEAD + bytes)) && pwrite(fd, &head, sizeof head, 0) == sizeof head) {
        lock_byte(fd, 0, F_WRLCK, F_OFD_SETLK, NULL);
        piece = map_piece(name, fd, bytes, current(), 0);
    }
    pthread_mutex_unlock(&lock);
    if (!piece) return OUT_OF_MEMORY;
    memset(piece->at, 0xee, bytes); /* a driver does not zero new memory */
    *pointer = (uint64_t)piece->at;
    return OK;
}

int cuMemFree_v2(uint64_t pointer) {
    NEED_CONTEXT();
    Piece *piece = piece_at(pointer);
    if (!piece || piece->opened || (uint64_t)piece->at != pointer) return INVALID_VALUE;
    finish_fill();
    shm_unlink(piece->name);
    unmap_piece(piece);
    return OK;
}

int cuMemsetD8_v2(uint64_t pointer, unsigned char value, size_t bytes) {
    NEED_CONTEXT();
    MAY_FAIL();
    Piece *piece = piece_at(pointer);
    if (!piece || pointer + bytes > (uint64_t)piece->at + piece->bytes) return INVALID_VALUE;
    finish_fill();
    fill.value = value, fill.bytes = bytes, fill.at = (char *)pointer;
    return OK;
}

int cuCtxSynchronize(void) {
    NEED_CONTEXT();
    MAY_FAIL();
    finish_fill();
    return OK;
}

int cuMemcpyDtoH_v2(void *host, uint64_t pointer, size_t bytes) {
    NEED_CONTEXT();
    Piece *piece = piece_at(pointer);
    if (!piece || pointer + bytes > (uint64_t)piece->at + piece->bytes) return INVALID_VALUE;
    finish_fill();
    memcpy(host, (void *)pointer, bytes);
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t pointer, const void *host, size_t bytes) {
    NEED_CONTEXT();
    Piece *piece = piece_at(pointer);
    if (!piece || pointer + bytes > (uint64_t)piece->at + piece->bytes) return INVALID_VALUE;
    finish_fill();
    char *copy = malloc(bytes);
    if (!copy) return OUT_OF_MEMORY;
    memcpy(copy, host, bytes);
    fill.copy = copy, fill.bytes = bytes, fill.at = (char *)pointer;
    return OK;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t pointer) {
    NEED_CONTEXT();
    if (getenv("STAND_IN_CUDA_NO_IPC")) return NOT_SUPPORTED;
    Piece *piece = piece_at(pointer);
    if (!piece || piece->opened) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, piece->name, sizeof piece->name);
    return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, Handle handle, unsigned flags) {
    NEED_CONTEXT();
    if (flags != 1) return INVALID_VALUE;
    char name[48];
    memcpy(name, handle.reserved, sizeof name);
    name[sizeof name - 1] = 0;
    int status = OK;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_PIECES; i++)
        if (pieces[i].at && pieces[i].opened && !strcmp(pieces[i].name, name)) {
            pieces[i].opened++, *pointer = (uint64_t)pieces[i].at;
            pthread_mutex_unlock(&lock);
            return OK;
        }
    Head head = {0};
    Piece *piece = NULL;
    int fd = *name ? shm_open(name, O_RDWR, 0) : -1;
    if (fd < 0 || pread(fd, &head, sizeof head, 0) != sizeof head || !is_locked(fd, 0)) status = INVALID_VALUE;
    else if (head.pid == getpid() || head.device != current()) status = INVALID_CONTEXT;
    else if (!(piece = map_piece(name, fd, head.bytes, head.device, 1))) status = MAP_FAILED_;
    else *pointer = (uint64_t)piece->at;
    if (status && fd >= 0) close(fd);
    pthread_mutex_unlock(&lock);
    return status;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    NEED_CONTEXT();
    Piece *piece = piece_at(pointer);
    if (!piece || !piece->opened || (uint64_t)piece->at != pointer) return INVALID_VALUE;
    if (--piece->opened == 0) unmap_piece(piece);
    return OK;
}
