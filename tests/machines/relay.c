// A link between two network namespaces, as not every kernel has netem: two TUN devices, and a packet that is read from
// one is written to the other when its time has come. It has a rate, a delay, and a share of packets that it loses.
//
//     relay NAMESPACE NAMESPACE BITS_A_SECOND MICROSECONDS PER_CENT
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define LARGEST 70000       // bytes of a packet
#define QUEUE (4L << 20)    // bytes under way in one direction, unless rate and delay need more
#define AT_ONCE 16          // packets read before the due ones are written

typedef struct packet {
    struct packet *next;
    double due;
    int size;
    char bytes[];
} packet;

static double rate, delay, loss;
static int ends[2];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void failed(const char *what) {
    perror(what);
    exit(1);
}

// The device `net0` in a namespace. The calling thread stays there.
static int made_in(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", name);
    int space = open(path, O_RDONLY);
    if (space < 0 || setns(space, CLONE_NEWNET))
        failed(path);
    close(space);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {0};
    strcpy(request.ifr_name, "net0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (device < 0 || ioctl(device, TUNSETIFF, &request))
        failed("/dev/net/tun");
    return device;
}

// One direction, for ever: read, hold until it is due, write.
static _Noreturn void *carry(void *direction) {
    static __thread char buffer[LARGEST];
    int in = ends[(long)direction], out = ends[1 - (long)direction];
    unsigned seed = (long)direction + 1;
    packet *head = NULL, **tail = &head;
    long queued = 0, most = QUEUE;
    double free_at = 0;
    if (2 * rate / 8 * delay > most)
        most = 2 * rate / 8 * delay;
    prctl(PR_SET_TIMERSLACK, 1000);
    for (;;) {
        double t = now();
        while (head && head->due <= t) {
            packet *sent = head;
            if (!(head = sent->next))
                tail = &head;
            if (write(out, sent->bytes, sent->size) < 0 && errno == EAGAIN)
                usleep(50);
            queued -= sent->size;
            free(sent);
        }
        int got = 0;
        while (queued < most && got < AT_ONCE) {
            int size = read(in, buffer, sizeof buffer);
            if (size <= 0)
                break;
            got++;
            t = now();
            if (loss > 0 && rand_r(&seed) < loss / 100 * RAND_MAX)
                continue;
            packet *held = malloc(sizeof *held + size);
            memcpy(held->bytes, buffer, size);
            held->size = size;
            held->next = NULL;
            free_at = (free_at > t ? free_at : t) + (rate > 0 ? size * 8 / rate : 0);
            held->due = free_at + delay;
            *tail = held;
            tail = &held->next;
            queued += size;
        }
        if (got)
            continue;
        struct pollfd waits = {in, queued < most ? POLLIN : 0, 0};
        struct timespec until;
        if (head) {
            double left = head->due - now();
            left = left > 0 ? left : 0;
            until.tv_sec = left;
            until.tv_nsec = (left - until.tv_sec) * 1e9;
        }
        ppoll(&waits, 1, head ? &until : NULL, NULL);
        if (waits.revents & POLLERR)
            usleep(2000); // the device is down
    }
}

int main(int count, char **words) {
    if (count != 6) {
        fputs("relay NAMESPACE NAMESPACE BITS_A_SECOND MICROSECONDS PER_CENT\n", stderr);
        return 2;
    }
    rate = atof(words[3]), delay = atof(words[4]) * 1e-6, loss = atof(words[5]);
    ends[0] = made_in(words[1]), ends[1] = made_in(words[2]);
    puts("up");
    fflush(stdout);
    pthread_t other;
    pthread_create(&other, NULL, carry, (void *)1);
    carry((void *)0);
}
