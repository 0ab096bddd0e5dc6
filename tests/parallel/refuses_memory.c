/* Preloaded, it stands in for a sandbox, container or emulator that lets no process read another one's memory. */
#include <errno.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t process_vm_readv(pid_t pid, const struct iovec *ours, unsigned long num_ours, const struct iovec *theirs,
                         unsigned long num_theirs, unsigned long flags) {
#ifdef BUT_ITS_OWN
    if (pid == getpid()) {
        ssize_t length = ours->iov_len;
        __builtin_memcpy(ours->iov_base, theirs->iov_base, length);
        return length;
    }
#endif
    errno = WHY;
    return -1;
}
